//! What the lanes of a warp do together: shuffles, votes, reductions, and the tensor cores' loads and products.

use crate::block::Block;
use crate::instruction::{Op, Product, Reg, ShuffleKind, VoteKind};
use crate::scalar::{Lanes, WARP, to_tf32};
use crate::shared::Access;
use crate::types::Type;
use crate::warp::{Warp, bits};
use crate::{FaultKind, Problem};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

/// Rows of a's and columns of b's tile.
const ROWS: usize = 16;
const COLUMNS: usize = 8;
/// The deepest product.
const DEPTH: usize = 16;

impl Warp {
    /// Runs a collective for the lanes that came to it together: all that it names.
    pub(crate) fn collective(&mut self, op: &Op, here: u32, block: &mut Block<'_>) -> Result<(), Problem> {
        match op {
            Op::Shuffle { .. } => self.shuffle(op, here)?,
            &Op::Vote { kind, to, predicate, negate, members } => {
                let votes = bits(here).filter(|&lane| (self.registers[predicate][lane] & 1 != 0) != negate);
                let votes = votes.fold(0, |mask, lane| mask | 1 << lane);
                let value = self.registers[members].map(|members| {
                    let (members, yes) = (members as u32 & here, votes & members as u32);
                    match kind {
                        VoteKind::Ballot => u64::from(yes),
                        VoteKind::All => u64::from(yes == members),
                        VoteKind::Any => u64::from(yes != 0),
                        VoteKind::Uniform => u64::from(yes == members || yes == 0),
                    }
                });
                self.set(to, &value, here);
            }
            &Op::Reduce { f, to, value, members } => {
                let value = self.registers[value];
                let zero = [0; WARP];
                let result = self.registers[members].map(|members| {
                    let combine = |a: u64, b: u64| f(&[&[a; WARP], &[b; WARP], &zero, &zero])[0];
                    bits(members as u32 & here).map(|lane| value[lane]).reduce(combine).unwrap_or_default()
                });
                self.set(to, &result, here);
            }
            Op::WarpBarrier { .. } => block.shared.warp_barrier(self.index),
            Op::Product { product, to, a, b, c } => {
                self.whole(here)?;
                self.multiply(*product, to, a, b, c);
            }
            Op::LoadMatrix { .. } => {
                self.whole(here)?;
                self.load_matrix(op, block)?;
            }
            other => unreachable!("{other:?} is not a collective"),
        }
        Ok(())
    }

    fn whole(&self, here: u32) -> Result<(), Problem> {
        let missing =
            || format!("the tensor cores need all 32 lanes, and only {} are there", here.count_ones());
        if here == !0 { Ok(()) } else { Err(Problem::new(FaultKind::MissingLane, missing())) }
    }

    /// PTX ISA, "shfl.sync": `clamp` holds the last lane in bits 0 to 4 and the mask of segments in bits 8 to 12.
    fn shuffle(&mut self, op: &Op, here: u32) -> Result<(), Problem> {
        let &Op::Shuffle { kind, to, valid, value, lane: by, clamp, members } = op else {
            unreachable!("called for shuffles only")
        };
        let (mut result, mut inside): (Lanes, Lanes) = ([0; WARP], [0; WARP]);
        for lane in bits(here) {
            let own = lane as u32;
            let (by, clamp) = (self.registers[by][lane] as u32 & 31, self.registers[clamp][lane] as u32);
            let (last, segment) = (clamp & 31, clamp >> 8 & 31);
            let (least, most) = (own & segment, own & segment | last & !segment);
            let (source, within) = match kind {
                ShuffleKind::Index => (least | by & !segment, (least | by & !segment) <= most),
                ShuffleKind::Up => (own.wrapping_sub(by), own as i32 - by as i32 >= most as i32),
                ShuffleKind::Down => (own + by, own + by <= most),
                ShuffleKind::Butterfly => (own ^ by, own ^ by <= most),
            };
            let source = if within { source } else { own } as usize;
            if here >> source & 1 == 0 || self.registers[members][lane] >> source & 1 == 0 {
                let what = format!("lane {lane} takes its value from lane {source}, which takes no part");
                return Err(Problem::new(FaultKind::MissingLane, what).at(lane));
            }
            result[lane] = self.registers[value][source];
            inside[lane] = u64::from(within);
        }
        self.set(to, &result, here);
        self.set(valid, &inside, here);
        Ok(())
    }

    /// PTX ISA, "ldmatrix": lane `8 t + r` has the address of row `r` of tile `t`; lane `l` gets elements `2 (l % 4)` and the
    /// next of row `l / 4`, or of that column where the tile is transposed.
    fn load_matrix(&mut self, op: &Op, block: &mut Block<'_>) -> Result<(), Problem> {
        let Op::LoadMatrix { to, address, transpose } = op else { unreachable!("called for ldmatrix only") };
        for (tile, &to) in to.iter().enumerate() {
            let mut rows = [[0_u16; 8]; 8];
            for (row, elements) in rows.iter_mut().enumerate() {
                let lane = tile * 8 + row;
                let base = self.registers[address.base][lane];
                let at = if address.narrow { u64::from(base as u32) } else { base }
                    .wrapping_add(address.offset as u64);
                if !at.is_multiple_of(16) {
                    let what = format!("row of ldmatrix at {at:#x} of shared memory is not a multiple of 16");
                    return Err(Problem::new(FaultKind::Misaligned, what).at(lane));
                }
                let bytes = block
                    .shared
                    .access(Access::Read, self.thread(lane), at, 16)
                    .map_err(|problem| problem.at(lane))?;
                *elements =
                    std::array::from_fn(|index| u16::from_le_bytes([bytes[2 * index], bytes[2 * index + 1]]));
            }
            self.registers[to] = std::array::from_fn(|lane| {
                let (row, pair) = (lane / 4, lane % 4 * 2);
                let (low, high) = if *transpose {
                    (rows[pair][row], rows[pair + 1][row])
                } else {
                    (rows[row][pair], rows[row][pair + 1])
                };
                u64::from(low) | u64::from(high) << 16
            });
        }
        Ok(())
    }

    /// PTX ISA, "Matrix fragments for mma.m16n8k16": with `g = lane / 4` and `t = lane % 4`, a lane's registers of a hold rows g
    /// and g + 8, those of b column g, each with neighbouring elements `2 t` (16-bit) or `t` (tf32) of a stretch of 8 or 4; c and
    /// d hold columns `2 t` and the next of rows g and g + 8. Sums are in f32, in order of depth: the hardware's order differs.
    fn multiply(&mut self, product: Product, to: &[Reg], a: &[Reg], b: &[Reg], c: &[Reg]) {
        let mut left = [[0_f32; DEPTH]; ROWS];
        let mut right = [[0_f32; COLUMNS]; DEPTH];
        let per_word = if product.ty == Type::Tf32 { 1 } else { 2 };
        for (index, &reg) in a.iter().enumerate() {
            let values = self.elements(reg, product.ty);
            for lane in 0..WARP {
                for part in 0..per_word {
                    let depth = index / 2 * 4 * per_word + lane % 4 * per_word + part;
                    left[lane / 4 + index % 2 * 8][depth] = values[lane * per_word + part];
                }
            }
        }
        for (index, &reg) in b.iter().enumerate() {
            let values = self.elements(reg, product.ty);
            for lane in 0..WARP {
                for part in 0..per_word {
                    right[index * 4 * per_word + lane % 4 * per_word + part][lane / 4] =
                        values[lane * per_word + part];
                }
            }
        }
        let mut sums = [[0_f32; COLUMNS]; ROWS];
        let place = |index: usize, lane: usize| (lane / 4 + index / 2 * 8, lane % 4 * 2 + index % 2);
        for (index, &reg) in c.iter().enumerate() {
            for lane in 0..WARP {
                let (row, column) = place(index, lane);
                sums[row][column] = f32::from_bits(self.registers[reg][lane] as u32);
            }
        }
        for (sum, left) in sums.iter_mut().zip(&left) {
            for (factor, right) in left.iter().zip(&right).take(product.depth) {
                for (sum, value) in sum.iter_mut().zip(right) {
                    *sum += factor * value;
                }
            }
        }
        for (index, &reg) in to.iter().enumerate() {
            self.registers[reg] = std::array::from_fn(|lane| {
                let (row, column) = place(index, lane);
                u64::from(sums[row][column].to_bits())
            });
        }
    }

    /// The one or two elements that each lane's register holds, as f32, lane after lane.
    fn elements(&self, reg: Reg, ty: Type) -> [f32; 2 * WARP] {
        let words = &self.registers[reg];
        let half = |index: usize| (words[index / 2] >> (16 * (index % 2))) as u16;
        let mut values = [0.0; 2 * WARP];
        match ty {
            Type::F16 => std::array::from_fn::<_, { 2 * WARP }, _>(|index| f16::from_bits(half(index)))
                .convert_to_f32_slice(&mut values),
            Type::Bf16 => std::array::from_fn::<_, { 2 * WARP }, _>(|index| bf16::from_bits(half(index)))
                .convert_to_f32_slice(&mut values),
            _ => {
                for (value, word) in values.iter_mut().zip(words) {
                    *value = to_tf32(f32::from_bits(*word as u32));
                }
            }
        }
        values
    }
}
