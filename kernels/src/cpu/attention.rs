//! Causal self-attention, forward and backward, without a `context × context` matrix.
//!
//! Both directions walk tiles of at most [`QUERIES`] × [`KEYS`] scores, and skip those above the diagonal. Products are
//! the `gemm` crate's, reading queries, keys and values where they lie in `qkv`; between them one vectorised pass over
//! the tile's rows does the softmax.
//!
//! Forward, a block of queries a task: for each block of keys, `S = q kᵀ`; with the row maxima `m` and sums `l` so far
//! (Milakov and Gimelshein, 2018), `P = exp(scale S - m)`, and `out` is scaled to the new maximum before `P v` is added
//! to it. At the end `out /= l` and `lse = m + ln l`. Up to [`KEYS`] positions there is one block of keys, so nothing is
//! ever scaled again.
//!
//! Backward (Dao et al., 2022), a head of a sequence a task: with `D = rowsum(dout ∘ out)`, for each tile
//! `P = exp(scale S - lse)`, `dP = dout vᵀ`, `dS = scale P ∘ (dP - D)`, then `dv += Pᵀ dout`, `dq += dS k`,
//! `dk += dSᵀ q`. Queries go from the last block to the first: the last sees every key, so it writes `dk` and `dv` and the
//! others add.
//!
//! Dropout with factors `Z` multiplies what meets `v`: `out = (Z ∘ P) v`, `dv += (Z ∘ P)ᵀ dout`,
//! `dS = scale P ∘ (Z ∘ dP - D)`. `D` stays right: `dout · out = Σ Z P (dout · v) = Σ P ∘ (Z ∘ dP)`, which is what the
//! gradient of a softmax subtracts. `lse` knows nothing of dropout.
//!
//! Every sum is in an order that the shape alone decides. Non-finite values propagate; since a tile on the diagonal
//! multiplies by its zeros too, one at position `t` may also reach earlier rows of the block of queries that holds `t`.
//!
//! Cost: `2 · 2` operations a channel and a visible pair forward, `5 · 2` backward, and up to a block's half more on the
//! diagonal. Memory: two tiles and two rows a thread, kept between calls: 0.3 MiB.

use std::{cell::RefCell, ops::Range};

use multiversion::multiversion;

use super::{
    float::{FloatParts, Floats},
    gemm::{View, product},
    math::{exp, maximum, sum, sum_of},
    threads::{Parts, Threads},
};
use crate::op::{AttentionShape, Dropout};

/// Rows of a tile. More would waste work above the diagonal, fewer would pack keys and values more often.
const QUERIES: usize = 64;
/// Columns of a tile, a multiple of [`QUERIES`].
const KEYS: usize = 512;
/// From one row of a tile to the next: not a power of two, so that rows do not share cache sets.
const STRIDE: usize = KEYS + 16;

/// See [`crate::op::Attention`].
pub(crate) fn attention(
    threads: &Threads,
    qkv: Floats<'_>,
    out: &FloatParts<'_>,
    lse: &mut [f32],
    shape: &AttentionShape,
    dropout: Option<Dropout>,
) {
    assert_eq!((qkv.len(), out.len(), lse.len()), (3 * shape.channels(), shape.channels(), shape.rows()));
    if out.len() == 0 {
        return;
    }
    let blocks = shape.context.div_ceil(QUERIES);
    let (heads, bytes) = (shape.batch * shape.heads, 4 * (qkv.len() + out.len()));
    let lse = Parts::new(lse);
    if let (Floats::F32(qkv), FloatParts::F32(out)) = (qkv, out) {
        threads.for_each(heads * blocks, bytes, |task| {
            let head = Head::new(shape, task / blocks);
            SCRATCH.with_borrow_mut(|scratch| head.forward(task % blocks, qkv, out, &lse, dropout, scratch));
        });
        return;
    }
    // A head a task, which is converted whole.
    threads.for_each(heads, bytes, |task| {
        let (head, alone) = (Head::new(shape, task), Head::alone(shape, task));
        let mut own = vec![0.0; 4 * shape.context * shape.head_size];
        let (of_qkv, of_out) = own.split_at_mut(3 * shape.context * shape.head_size);
        head.gather(qkv, 3, of_qkv);
        let parts = Parts::new(&mut *of_out);
        for block in 0..blocks {
            SCRATCH.with_borrow_mut(|scratch| alone.forward(block, of_qkv, &parts, &lse, dropout, scratch));
        }
        head.scatter(of_out, 1, out);
    });
}

/// See [`crate::op::AttentionBackward`].
pub(crate) fn attention_backward(
    threads: &Threads,
    dout: Floats<'_>,
    qkv: Floats<'_>,
    out: Floats<'_>,
    lse: &[f32],
    dqkv: &FloatParts<'_>,
    workspace: &mut [f32],
    shape: &AttentionShape,
    dropout: Option<Dropout>,
) {
    assert_eq!((qkv.len(), dqkv.len()), (3 * shape.channels(), 3 * shape.channels()));
    assert_eq!((dout.len(), out.len()), (shape.channels(), shape.channels()));
    assert_eq!((lse.len(), workspace.len()), (shape.rows(), shape.rows()));
    if out.len() == 0 {
        return;
    }
    let bytes = 4 * (qkv.len() + dqkv.len() + out.len() + dout.len());
    let workspace = Parts::new(workspace);
    threads.for_each(shape.batch * shape.heads, bytes, |task| {
        let head = Head::new(shape, task);
        // SAFETY: each task has rows of its own: those of its head.
        let d = unsafe { workspace.slice(task * shape.context, shape.context) };
        let lse = &lse[task * shape.context..][..shape.context];
        if let (Floats::F32(dout), Floats::F32(qkv), Floats::F32(out), FloatParts::F32(dqkv)) =
            (dout, qkv, out, dqkv)
        {
            head.row_sums(dout, out, d);
            SCRATCH.with_borrow_mut(|scratch| head.backward(dout, qkv, lse, d, dqkv, dropout, scratch));
            return;
        }
        let (alone, channels) = (Head::alone(shape, task), shape.context * shape.head_size);
        let mut own = vec![0.0; 8 * channels];
        let (of_qkv, rest) = own.split_at_mut(3 * channels);
        let (of_dqkv, rest) = rest.split_at_mut(3 * channels);
        let (of_dout, of_out) = rest.split_at_mut(channels);
        head.gather(qkv, 3, of_qkv);
        head.gather(dout, 1, of_dout);
        head.gather(out, 1, of_out);
        alone.row_sums(of_dout, of_out, d);
        let parts = Parts::new(&mut *of_dqkv);
        SCRATCH.with_borrow_mut(|scratch| alone.backward(of_dout, of_qkv, lse, d, &parts, dropout, scratch));
        head.scatter(of_dqkv, 3, dqkv);
    });
}

/// What a thread works in: two tiles, and the dropout factors of a row.
struct Scratch {
    scores: Vec<f32>,
    gradients: Vec<f32>,
    factors: Vec<f32>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::new(Scratch {
        scores: vec![0.0; QUERIES * STRIDE],
        gradients: vec![0.0; QUERIES * STRIDE],
        factors: vec![0.0; KEYS],
    });
}

/// The softmax of a block of queries, as far as its keys were seen.
struct Running {
    max: [f32; QUERIES],
    sum: [f32; QUERIES],
    /// What the last block of keys asks `out` to be multiplied by.
    rescale: [f32; QUERIES],
}

/// A head of a sequence.
struct Head {
    /// `batch · heads + head`.
    index: usize,
    context: usize,
    size: usize,
    scale: f32,
    /// From a position to the next in `out`; a third of that in `qkv`.
    width: usize,
    /// Where the head's channels of position 0 are in `out`.
    start: usize,
    /// Where its queries of position 0 are in `qkv`; keys and values follow, `width` apart.
    qkv_start: usize,
}

/// A tile's place: scores of queries `first_query..` and keys `first_key..`.
#[derive(Clone, Copy)]
struct Tile {
    first_query: usize,
    queries: usize,
    first_key: usize,
    keys: usize,
}

impl Head {
    fn new(shape: &AttentionShape, index: usize) -> Self {
        let width = shape.heads * shape.head_size;
        let (sequence, head) = (index / shape.heads, index % shape.heads);
        let (row, column) = (sequence * shape.context, head * shape.head_size);
        Head {
            index,
            context: shape.context,
            size: shape.head_size,
            scale: shape.scale,
            width,
            start: row * width + column,
            qkv_start: row * 3 * width + column,
        }
    }

    /// The same head where nothing else is in its buffers, position after position.
    fn alone(shape: &AttentionShape, index: usize) -> Self {
        Head { width: shape.head_size, start: 0, qkv_start: 0, ..Head::new(shape, index) }
    }

    /// Where the head's channels of a position are, in a buffer of `parts` times the width: 3 of `qkv`, 1 of `out`.
    fn channels(&self, parts: usize, position: usize, part: usize) -> Range<usize> {
        let start = if parts == 3 { self.qkv_start } else { self.start };
        let first = start + position * parts * self.width + part * self.width;
        first..first + self.size
    }

    /// Converts the head's channels into a buffer of its own.
    fn gather(&self, from: Floats<'_>, parts: usize, out: &mut [f32]) {
        for (i, out) in out.chunks_exact_mut(self.size).enumerate() {
            from.widen(self.channels(parts, i / parts, i % parts), out);
        }
    }

    /// Converts a buffer of the head's own back to where its channels are.
    fn scatter(&self, own: &[f32], parts: usize, out: &FloatParts<'_>) {
        let mut scratch = Vec::new();
        for (i, own) in own.chunks_exact(self.size).enumerate() {
            let channels = self.channels(parts, i / parts, i % parts);
            // SAFETY: a task has its head's channels to itself.
            unsafe { out.write(channels, &mut scratch, |out| out.copy_from_slice(own)) };
        }
    }

    /// Queries, keys and values, one position a row.
    fn views<'a>(&self, qkv: &'a [f32]) -> [View<'a>; 3] {
        [0, 1, 2].map(|i| View::rows(&qkv[self.qkv_start + i * self.width..], 3 * self.width))
    }

    /// The tiles of a block of queries, from the first key on.
    fn tiles(&self, block: usize) -> impl Iterator<Item = Tile> + use<> {
        let first_query = block * QUERIES;
        let end = (first_query + QUERIES).min(self.context);
        let tile = move |first_key| Tile {
            first_query,
            queries: end - first_query,
            first_key,
            keys: KEYS.min(end - first_key),
        };
        (0..end).step_by(KEYS).map(tile)
    }

    /// Index in the dropout's stream of the first key of a tile's first query; the next query is `context` further.
    fn first_index(&self, tile: Tile) -> u64 {
        let row = self.index as u64 * self.context as u64 + tile.first_query as u64;
        row * self.context as u64 + tile.first_key as u64
    }

    /// A block of queries, written to `out` and `lse`.
    fn forward(
        &self,
        block: usize,
        qkv: &[f32],
        out: &Parts<'_, f32>,
        lse: &Parts<'_, f32>,
        dropout: Option<Dropout>,
        scratch: &mut Scratch,
    ) {
        let Scratch { scores, factors, .. } = scratch;
        let [q, k, v] = self.views(qkv);
        let mut running =
            Running { max: [f32::NEG_INFINITY; QUERIES], sum: [0.0; QUERIES], rescale: [0.0; QUERIES] };
        let (first, queries) = (block * QUERIES, QUERIES.min(self.context - block * QUERIES));
        let row_start = |i: usize| self.start + (first + i) * self.width;
        for tile in self.tiles(block) {
            let later = tile.first_key > 0;
            let (k, v) = (k.at(tile.first_key, 0), v.at(tile.first_key, 0));
            let shape = [queries, tile.keys, self.size];
            // SAFETY: the tile is this task's own scratch, `QUERIES` rows of `STRIDE ≥ keys` elements.
            unsafe { product(shape, q.at(first, 0), k.transposed(), scores.as_mut_ptr(), STRIDE, false) };
            softmax_rows(scores, tile, self.scale, &mut running);
            if let Some(dropout) = dropout {
                drop_rows(scores, tile, &dropout, self.first_index(tile), self.context, factors);
            }
            if later {
                for (i, &rescale) in running.rescale[..queries].iter().enumerate() {
                    // SAFETY: the task's own head and queries; no other task has them.
                    let row = unsafe { out.slice(row_start(i), self.size) };
                    row.iter_mut().for_each(|x| *x *= rescale);
                }
            }
            let (p, shape) = (View::rows(scores, STRIDE), [queries, self.size, tile.keys]);
            // SAFETY: as above: `size` channels of each of the task's queries, written by the first tile.
            unsafe { product(shape, p, v, out.at(row_start(0)), self.width, later) };
        }
        // SAFETY: as above.
        let lse = unsafe { lse.slice(self.index * self.context + first, queries) };
        for (i, lse) in lse.iter_mut().enumerate() {
            let (max, sum) = (running.max[i], running.sum[i]);
            *lse = max + sum.ln();
            // SAFETY: as above.
            let row = unsafe { out.slice(row_start(i), self.size) };
            row.iter_mut().for_each(|x| *x /= sum);
        }
    }

    /// `d[t] = dout[t] · out[t]`.
    fn row_sums(&self, dout: &[f32], out: &[f32], d: &mut [f32]) {
        for (t, d) in d.iter_mut().enumerate() {
            let start = self.start + t * self.width;
            *d = dot(&dout[start..start + self.size], &out[start..start + self.size]);
        }
    }

    /// The head's part of `dqkv`.
    fn backward(
        &self,
        dout: &[f32],
        qkv: &[f32],
        lse: &[f32],
        d: &[f32],
        dqkv: &Parts<'_, f32>,
        dropout: Option<Dropout>,
        scratch: &mut Scratch,
    ) {
        let Scratch { scores, gradients, factors } = scratch;
        let [q, k, v] = self.views(qkv);
        let dout = View::rows(&dout[self.start..], self.width);
        let stride = 3 * self.width;
        let row = |third: usize, t: usize| dqkv.at(self.qkv_start + third * self.width + t * stride);
        let blocks = self.context.div_ceil(QUERIES);
        for tile in (0..blocks).rev().flat_map(|block| self.tiles(block)) {
            let Tile { first_query, queries, first_key, keys } = tile;
            let (q, dout) = (q.at(first_query, 0), dout.at(first_query, 0));
            let (k, v) = (k.at(first_key, 0), v.at(first_key, 0));
            let shape = [queries, keys, self.size];
            // SAFETY: the tiles are this task's own scratch, `QUERIES` rows of `STRIDE ≥ keys` elements.
            unsafe {
                product(shape, q, k.transposed(), scores.as_mut_ptr(), STRIDE, false);
                product(shape, dout, v.transposed(), gradients.as_mut_ptr(), STRIDE, false);
            }
            let rows = first_query..first_query + queries;
            let draw = dropout.map(|dropout| (dropout, self.first_index(tile)));
            gradient_rows(scores, gradients, tile, self, &lse[rows.clone()], &d[rows], draw, factors);
            let (p, ds) = (View::rows(scores, STRIDE), View::rows(gradients, STRIDE));
            let (to_key, to_query) = ([keys, self.size, queries], [queries, self.size, keys]);
            // The last block of queries comes first, and has a tile for every key.
            let (later_query, later_key) = (first_query + queries < self.context, first_key > 0);
            // SAFETY: a task has its head's columns of `dqkv` to itself, in each third and row of its sequence; where a
            // product accumulates an earlier tile of the same rows has written.
            unsafe {
                product(to_key, p.transposed(), dout, row(2, first_key), stride, later_query);
                product(to_key, ds.transposed(), q, row(1, first_key), stride, later_query);
                product(to_query, ds, k, row(0, first_query), stride, later_key);
            }
        }
    }
}

impl Tile {
    /// Keys of the tile that its row `i` sees; at least one, since a tile starts on or below the diagonal.
    #[inline(always)]
    fn visible(&self, i: usize) -> usize {
        self.keys.min(self.first_query + i + 1 - self.first_key)
    }
}

/// `P = exp(scale S - max)` in place, zero above the diagonal, with the maxima and sums brought up to date.
#[multiversion(targets("x86_64+avx2+fma"))]
fn softmax_rows(scores: &mut [f32], tile: Tile, scale: f32, running: &mut Running) {
    for i in 0..tile.queries {
        let row = &mut scores[i * STRIDE..][..tile.keys];
        let (row, hidden) = row.split_at_mut(tile.visible(i));
        hidden.fill(0.0);
        row.iter_mut().for_each(|x| *x *= scale);
        let max = maximum(row).max(running.max[i]);
        // Where nothing but -inf was seen, -inf - -inf would make NaN of what a later key can still outweigh.
        let shift = if max == f32::NEG_INFINITY { 0.0 } else { max };
        row.iter_mut().for_each(|x| *x = exp(*x - shift));
        let rescale = exp(running.max[i] - shift);
        running.sum[i] = running.sum[i] * rescale + sum(row);
        running.max[i] = max;
        running.rescale[i] = rescale;
    }
}

/// Multiplies a tile by its dropout factors.
#[multiversion(targets("x86_64+avx2+fma"))]
fn drop_rows(
    scores: &mut [f32],
    tile: Tile,
    dropout: &Dropout,
    first_index: u64,
    context: usize,
    factors: &mut [f32],
) {
    for i in 0..tile.queries {
        let row = &mut scores[i * STRIDE..][..tile.visible(i)];
        let factors = &mut factors[..row.len()];
        dropout.fill_factors(first_index + i as u64 * context as u64, factors);
        row.iter_mut().zip(factors).for_each(|(x, factor)| *x *= *factor);
    }
}

/// From scores `S` and `dout vᵀ` to `Z ∘ P` and `dS`, in place, zero above the diagonal.
#[multiversion(targets("x86_64+avx2+fma"))]
fn gradient_rows(
    scores: &mut [f32],
    gradients: &mut [f32],
    tile: Tile,
    head: &Head,
    lse: &[f32],
    d: &[f32],
    draw: Option<(Dropout, u64)>,
    factors: &mut [f32],
) {
    let scale = head.scale;
    for i in 0..tile.queries {
        let visible = tile.visible(i);
        let (scores, hidden) = scores[i * STRIDE..][..tile.keys].split_at_mut(visible);
        hidden.fill(0.0);
        let (gradients, hidden) = gradients[i * STRIDE..][..tile.keys].split_at_mut(visible);
        hidden.fill(0.0);
        let (lse, d) = (lse[i], d[i]);
        if let Some((dropout, first_index)) = draw {
            let factors = &mut factors[..visible];
            dropout.fill_factors(first_index + i as u64 * head.context as u64, factors);
            for ((score, gradient), &mut factor) in scores.iter_mut().zip(gradients).zip(factors) {
                let p = exp(*score * scale - lse);
                *score = p * factor;
                *gradient = p * (*gradient * factor - d) * scale;
            }
        } else {
            for (score, gradient) in scores.iter_mut().zip(gradients) {
                let p = exp(*score * scale - lse);
                *score = p;
                *gradient = p * (*gradient - d) * scale;
            }
        }
    }
}

#[multiversion(targets("x86_64+avx2+fma"))]
fn dot(a: &[f32], b: &[f32]) -> f32 {
    sum_of(a, b, |a, b| a * b)
}
