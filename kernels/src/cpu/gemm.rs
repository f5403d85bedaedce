//! Matrix products, summed in f32.
//!
//! The inner loops are the `gemm` crate's (packing and micro-kernels chosen for the machine at run time), one thread a
//! call. The parallelism is ours: the product is cut into pieces of about 256 × 192 whose bounds depend on the shape
//! alone, so the bits are the same whatever the thread count, and each piece with its packed operands stays in L2. That
//! is also quicker than the crate's own threads: it packs each operand once for all, behind a barrier.
//!
//! - `bias` is written to the piece before the product is added to it: a store that the product would have made anyway,
//!   and no pass over the result. An element is thus `((bias + s₁) + s₂) + …`, `sᵢ` the sum over the i-th stretch of `k`.
//! - `out` is not read unless the product accumulates or has a bias, so what it held, NaN included, does not matter.
//! - NaN and infinities propagate: no factor is skipped, not even zeros.
//! - A small product stays on the caller's thread.
//! - 16-bit operands are converted piece by piece, and a 16-bit result is rounded once, from the whole sum.
//!
//! Cost: `2 m n k` operations; each thread holds one packed piece of each operand, at most 1 MiB together.
//! `cargo bench -p ebbtide-kernels --bench gemm` prints what this machine reaches beside its ceiling.

use std::{cell::RefCell, ops::Range};

use super::{
    float::{FloatParts, Floats},
    threads::Threads,
};
use crate::op::Layout;

/// Rows and columns of a piece, about: what measured best over the products of GPT-2, forward and backward.
const PIECE_ROWS: usize = 256;
const PIECE_COLUMNS: usize = 192;
/// A large product is cut into at least as many pieces, as long as they stay above [`LEAST_ROWS`] × [`LEAST_COLUMNS`].
const LEAST_PIECES: usize = 8;
const LEAST_ROWS: usize = 64;
const LEAST_COLUMNS: usize = 96;
/// Bounds of pieces are multiples of it: whole registers on every instruction set.
const ALIGN: usize = 16;
/// Below as many multiply-adds the product is one piece: it takes less time than waking the pool does.
const SMALL: usize = 1 << 20;

/// `out = a · b (+ bias) (+ out)`: see [`crate::op::Gemm`].
pub(crate) struct GemmArgs<'a> {
    /// `m × k`, or `k × m` if transposed.
    pub(crate) a: Floats<'a>,
    pub(crate) a_layout: Layout,
    /// `k × n`, or `n × k` if transposed.
    pub(crate) b: Floats<'a>,
    pub(crate) b_layout: Layout,
    /// `n` values added to each row.
    pub(crate) bias: Option<&'a [f32]>,
    /// `m × n`.
    pub(crate) out: FloatParts<'a>,
    pub(crate) accumulate: bool,
    pub(crate) m: usize,
    pub(crate) n: usize,
    pub(crate) k: usize,
}

/// The product of two matrices, across the pool.
pub(crate) fn gemm(threads: &Threads, args: GemmArgs<'_>) {
    let GemmArgs { a, a_layout, b, b_layout, bias, out, accumulate, m, n, k } = args;
    assert_eq!((a.len(), b.len(), out.len()), (m * k, k * n, m * n));
    assert!(bias.is_none_or(|bias| bias.len() == n));
    if out.len() == 0 {
        return;
    }
    let (rows, columns) = piece(m, n, k);
    let across = n.div_ceil(columns);
    let (Floats::F32(a), Floats::F32(b), FloatParts::F32(out)) = (a, b, &out) else {
        let product = Converted { a, a_layout, b, b_layout, bias, out: &out, accumulate, m, n, k };
        threads.for_each(m.div_ceil(rows) * across, 4 * (m * k + k * n + m * n), |piece| {
            let (row, column) = (piece / across * rows, piece % across * columns);
            let (rows, columns) = (row..m.min(row + rows), column..n.min(column + columns));
            // SAFETY: pieces do not overlap.
            CONVERTED.with_borrow_mut(|scratch| unsafe { product.piece(rows, columns, scratch) });
        });
        return;
    };
    let a = View::matrix(a, a_layout, m, k);
    let b = View::matrix(b, b_layout, k, n);
    threads.for_each(m.div_ceil(rows) * across, 4 * (m * k + k * n + m * n), |piece| {
        let (row, column) = (piece / across * rows, piece % across * columns);
        let (rows, columns) = (rows.min(m - row), columns.min(n - column));
        // SAFETY: pieces do not overlap, and `out` is borrowed mutably until all are done; the last element of the
        // piece, `(row + rows - 1, column + columns - 1)`, is within `m × n`.
        unsafe {
            if let Some(bias) = bias {
                for i in row..row + rows {
                    let bias = &bias[column..column + columns];
                    let out = out.slice(i * n + column, columns);
                    match accumulate {
                        true => out.iter_mut().zip(bias).for_each(|(out, bias)| *out += bias),
                        false => out.copy_from_slice(bias),
                    }
                }
            }
            let out = out.at(row * n + column);
            let accumulate = accumulate || bias.is_some();
            product([rows, columns, k], a.at(row, 0), b.at(0, column), out, n, accumulate);
        }
    });
}

/// A product of which not all operands are f32.
struct Converted<'a> {
    a: Floats<'a>,
    a_layout: Layout,
    b: Floats<'a>,
    b_layout: Layout,
    bias: Option<&'a [f32]>,
    out: &'a FloatParts<'a>,
    accumulate: bool,
    m: usize,
    n: usize,
    k: usize,
}

/// Depth that a piece's operands are converted by at a time: with [`PIECE_ROWS`] and [`PIECE_COLUMNS`], 1.8 MiB.
const DEPTH: usize = 1024;

thread_local! {
    /// What a thread converts a piece's operands into, and its result: kept between calls.
    static CONVERTED: RefCell<[Vec<f32>; 3]> = RefCell::default();
}

impl Converted<'_> {
    /// A piece of the result, summed in f32 and rounded once.
    ///
    /// # Safety
    /// While this runs nothing else touches the piece's elements of `out`.
    unsafe fn piece(&self, rows: Range<usize>, columns: Range<usize>, scratch: &mut [Vec<f32>; 3]) {
        let [of_a, of_b, sum] = scratch;
        let (count, width) = (rows.len(), columns.len());
        sum.clear();
        sum.resize(count * width, 0.0);
        for first in (0..self.k).step_by(DEPTH) {
            let depth = first..self.k.min(first + DEPTH);
            let a = block(self.a, self.a_layout, [self.m, self.k], [&rows, &depth], of_a);
            let b = block(self.b, self.b_layout, [self.k, self.n], [&depth, &columns], of_b);
            // SAFETY: the sum is this thread's own, `count` rows of `width`.
            unsafe { product([count, width, depth.len()], a, b, sum.as_mut_ptr(), width, first > 0) };
        }
        let mut of_row = Vec::new();
        for (i, row) in rows.enumerate() {
            let sum = &sum[i * width..(i + 1) * width];
            let range = row * self.n + columns.start..row * self.n + columns.end;
            let bias = self.bias.map(|bias| &bias[columns.clone()]);
            let with_bias = |j: usize| sum[j] + bias.map_or(0.0, |bias| bias[j]);
            // SAFETY: the caller's contract.
            unsafe {
                match self.accumulate {
                    true => self.out.update(range, &mut of_row, |out| {
                        out.iter_mut().enumerate().for_each(|(j, out)| *out += with_bias(j));
                    }),
                    false => self.out.write(range, &mut of_row, |out| {
                        out.iter_mut().enumerate().for_each(|(j, out)| *out = with_bias(j));
                    }),
                }
            }
        }
    }
}

/// A block of a matrix as f32, in `scratch`, of whose rows and columns `range` says which.
fn block<'s>(
    matrix: Floats<'_>,
    layout: Layout,
    [rows, columns]: [usize; 2],
    [of_rows, of_columns]: [&Range<usize>; 2],
    scratch: &'s mut Vec<f32>,
) -> View<'s> {
    // As it is stored.
    let (stride, outer, inner) = match layout {
        Layout::Normal => (columns, of_rows, of_columns),
        Layout::Transposed => (rows, of_columns, of_rows),
    };
    scratch.resize(outer.len() * inner.len(), 0.0);
    for (out, i) in scratch.chunks_exact_mut(inner.len().max(1)).zip(outer.clone()) {
        matrix.widen(i * stride + inner.start..i * stride + inner.end, out);
    }
    let view = View::rows(scratch, inner.len());
    if layout == Layout::Transposed { view.transposed() } else { view }
}

/// Rows and columns of the pieces: a function of the shape alone.
fn piece(m: usize, n: usize, k: usize) -> (usize, usize) {
    if m.saturating_mul(n).saturating_mul(k) < SMALL {
        return (m, n);
    }
    let split = |length: usize, pieces: usize| length.div_ceil(pieces).next_multiple_of(ALIGN);
    let (mut down, mut across) = (m.div_ceil(PIECE_ROWS), n.div_ceil(PIECE_COLUMNS));
    while down * across < LEAST_PIECES {
        let (rows, columns) = (split(m, down), split(n, across));
        if rows >= 2 * LEAST_ROWS {
            down *= 2;
        } else if columns >= 2 * LEAST_COLUMNS {
            across *= 2;
        } else {
            break;
        }
    }
    (split(m, down), split(n, across))
}

/// A matrix to read, anywhere in a slice: element `(i, j)` is `data[i * row_stride + j * column_stride]`.
#[derive(Clone, Copy)]
pub(super) struct View<'a> {
    data: &'a [f32],
    row_stride: usize,
    column_stride: usize,
}

impl<'a> View<'a> {
    /// Contiguous rows, `stride` elements apart.
    pub(super) fn rows(data: &'a [f32], stride: usize) -> Self {
        View { data, row_stride: stride, column_stride: 1 }
    }

    /// A whole matrix, as an operand of a product stores it.
    fn matrix(data: &'a [f32], layout: Layout, rows: usize, columns: usize) -> Self {
        match layout {
            Layout::Normal => Self::rows(data, columns),
            Layout::Transposed => Self::rows(data, rows).transposed(),
        }
    }

    pub(super) fn transposed(self) -> Self {
        View { row_stride: self.column_stride, column_stride: self.row_stride, ..self }
    }

    /// What lies below and right of an element.
    pub(super) fn at(self, row: usize, column: usize) -> Self {
        let start = row * self.row_stride + column * self.column_stride;
        View { data: &self.data[start.min(self.data.len())..], ..self }
    }

    fn holds(&self, rows: usize, columns: usize) -> bool {
        let last = |count: usize, stride: usize| count.saturating_sub(1) * stride;
        rows == 0
            || columns == 0
            || last(rows, self.row_stride) + last(columns, self.column_stride) < self.data.len()
    }
}

/// `out = a · b (+ out)` on the calling thread, with `[m, n, k]` the shape and `out_stride` from a row of `out` to the
/// next.
///
/// # Safety
/// For each row `i` below `m`, the `n` elements from `out + i * out_stride` are the caller's alone to write; if the
/// product accumulates they are initialised.
pub(super) unsafe fn product(
    [m, n, k]: [usize; 3],
    a: View<'_>,
    b: View<'_>,
    out: *mut f32,
    out_stride: usize,
    accumulate: bool,
) {
    assert!(a.holds(m, k) && b.holds(k, n), "an operand is shorter than its shape");
    // The crate takes column strides before row strides, and its first factor is that of what `out` held.
    let (out_factor, product_factor) = (1.0, 1.0);
    // SAFETY: `a` and `b` hold every element that their shapes and strides reach, as asserted; `out` is by contract.
    // Strides are within allocations, so they fit an isize.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            out,
            1,
            out_stride as isize,
            accumulate,
            a.data.as_ptr(),
            a.column_stride as isize,
            a.row_stride as isize,
            b.data.as_ptr(),
            b.column_stride as isize,
            b.row_stride as isize,
            out_factor,
            product_factor,
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
    }
}
