//! A product of matrices, as a library on the device computes it.

use std::ops::Range;

use ebbtide_ptx::{Memory, Problem};
use half::{bf16, f16};

/// What an element is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Number {
    /// 4 bytes.
    F32,
    /// 2 bytes, IEEE's.
    F16,
    /// 2 bytes, the upper half of an f32.
    BF16,
}

impl Number {
    /// Bytes of an element.
    pub fn bytes(self) -> usize {
        match self {
            Number::F32 => 4,
            _ => 2,
        }
    }

    fn to_f32(self, bytes: &[u8]) -> f32 {
        match (self, bytes) {
            (Number::F32, &[a, b, c, d]) => f32::from_le_bytes([a, b, c, d]),
            (Number::F16, &[a, b]) => f16::from_le_bytes([a, b]).to_f32(),
            (_, bytes) => bf16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
        }
    }

    fn push(self, value: f32, bytes: &mut Vec<u8>) {
        match self {
            Number::F32 => bytes.extend(value.to_le_bytes()),
            Number::F16 => bytes.extend(f16::from_f32(value).to_le_bytes()),
            Number::BF16 => bytes.extend(bf16::from_f32(value).to_le_bytes()),
        }
    }
}

/// A matrix whose columns follow one another.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Matrix {
    /// Where it is on the device.
    pub start: u64,
    /// Rows as stored.
    pub rows: usize,
    /// Columns as stored.
    pub columns: usize,
    /// Elements from a column to the next.
    pub stride: usize,
    /// What an element is.
    pub number: Number,
}

impl Matrix {
    /// Bytes from its first element to its last.
    fn range(&self) -> Range<u64> {
        let elements = (self.columns - 1) * self.stride + self.rows;
        self.start..self.start + (elements * self.number.bytes()) as u64
    }

    /// Its elements, column by column.
    fn load(&self, memory: &mut dyn Memory) -> Result<Vec<f32>, Problem> {
        let width = self.number.bytes();
        let mut column = vec![0; self.rows * width];
        let mut values = Vec::with_capacity(self.rows * self.columns);
        for number in 0..self.columns {
            memory.read(self.start + (number * self.stride * width) as u64, &mut column)?;
            values.extend(column.chunks_exact(width).map(|bytes| self.number.to_f32(bytes)));
        }
        Ok(values)
    }
}

/// `out = alpha · op(a) · op(b) + beta · c + bias`, with sums in f32; op transposes or does nothing.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Product {
    /// The left factor.
    pub a: Matrix,
    /// The right factor.
    pub b: Matrix,
    /// What is added; read only if `beta` is not 0.
    pub c: Matrix,
    /// The result.
    pub out: Matrix,
    /// Whether the left factor is transposed.
    pub a_transposed: bool,
    /// Whether the right one is.
    pub b_transposed: bool,
    /// Factor of the product.
    pub alpha: f32,
    /// Factor of `c`.
    pub beta: f32,
    /// One a row, of the result's type; 0 for none.
    pub bias: u64,
    /// What the library may use beside, and its bytes.
    pub workspace: u64,
    /// Bytes of it.
    pub workspace_bytes: usize,
}

impl Product {
    /// What it reads, and what it writes; the workspace counts as written.
    pub(crate) fn ranges(&self) -> (Vec<Range<u64>>, Vec<Range<u64>>) {
        let mut reads = vec![self.a.range(), self.b.range()];
        if self.beta != 0.0 {
            reads.push(self.c.range());
        }
        if self.bias != 0 {
            reads.push(self.bias..self.bias + (self.out.rows * self.out.number.bytes()) as u64);
        }
        (reads, vec![self.out.range(), self.workspace..self.workspace + self.workspace_bytes as u64])
    }

    pub(crate) fn run(&self, memory: &mut dyn Memory) -> Result<(), Problem> {
        let (m, n) = (self.out.rows, self.out.columns);
        let k = if self.a_transposed { self.a.rows } else { self.a.columns };
        // The left factor row by row, the right one column by column.
        let a = rows(self.a.load(memory)?, self.a.rows, !self.a_transposed);
        let b = rows(self.b.load(memory)?, self.b.rows, self.b_transposed);
        let c = if self.beta != 0.0 { self.c.load(memory)? } else { vec![0.0; m * n] };
        let bias = match self.bias {
            0 => vec![0.0; m],
            start => Matrix { start, rows: m, columns: 1, stride: m, ..self.out }.load(memory)?,
        };
        let width = self.out.number.bytes();
        for column in 0..n {
            let right = &b[column * k..][..k];
            let mut bytes = Vec::with_capacity(m * width);
            for row in 0..m {
                let sum: f32 = a[row * k..][..k].iter().zip(right).map(|(a, b)| a * b).sum();
                let at = column * m + row;
                self.out.number.push(self.alpha * sum + self.beta * c[at] + bias[row], &mut bytes);
            }
            memory.write(self.out.start + (column * self.out.stride * width) as u64, &bytes)?;
        }
        Ok(())
    }
}

/// A matrix that lies column by column in columns of `rows` elements, transposed if asked.
fn rows(values: Vec<f32>, rows: usize, transpose: bool) -> Vec<f32> {
    if !transpose {
        return values;
    }
    let columns = values.len() / rows.max(1);
    (0..rows)
        .flat_map(|row| (0..columns).map(move |column| column * rows + row))
        .map(|at| values[at])
        .collect()
}
