//! How well an order mixes a dataset, known before training: [`shuffle_report`].

use std::collections::HashSet;

use crate::order::Order;
use crate::{LoaderOptions, Result, Samples, order_of};

/// Batches of which blocks are counted.
const BATCHES: u64 = 64;
/// Windows that are looked at for whether the data is sorted.
const PROBES: u64 = 256;
/// Bytes of the pieces of the data that a batch's windows are counted by where the order has no blocks.
const PIECE_BYTES: u64 = 1 << 20;
/// Runs are this many standard deviations fewer than chance has them where data counts as sorted: neighbouring chapters of one book
/// are within it.
const SORTED: f64 = -8.0;

/// What an order does to the data's own.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct ShuffleReport {
    /// Samples that a sample may be mixed with: those of the open blocks, or all.
    pub window_samples: u64,
    /// Of all samples.
    pub window_share: f64,
    /// Different blocks that a batch's samples come from, of the first batches: the mean. Blocks of the order, or pieces of 1 MiB.
    pub blocks_in_batch: f64,
    /// The most that it could be: the smaller of the samples of a batch and the blocks there are.
    pub most_blocks_in_batch: u64,
    /// Runs of windows whose mean token is above, or below, the median of 256 windows spread evenly over the data.
    pub runs: u64,
    /// What chance would make of them.
    pub runs_by_chance: f64,
    /// The difference in standard deviations: far below 0 if like lies beside like.
    pub runs_score: f64,
}

impl ShuffleReport {
    /// Whether like lies beside like in the data.
    pub fn is_sorted(&self) -> bool {
        self.runs_score < SORTED
    }

    /// What a user should know before training, if anything.
    pub fn warning(&self) -> Option<String> {
        (self.is_sorted() && self.window_share < 0.5).then(|| {
            format!(
                "the data looks sorted ({} runs where chance makes {:.0}), and the order mixes {:.1} % of it at a time: random order, \
                 a wider window of blocks, or data that is shuffled once would mix it",
                self.runs,
                self.runs_by_chance,
                100.0 * self.window_share
            )
        })
    }
}

/// How a loader with these options will mix the samples. Reads 256 windows.
///
/// # Errors
///
/// Those of [`order_of`] and [`Samples::read`].
pub fn shuffle_report(samples: &Samples, options: &LoaderOptions) -> Result<ShuffleReport> {
    let count = samples.count();
    let width = samples.most_bytes(1).max(1);
    let (window_samples, per_block) = match options.order {
        Order::Random => (count, (PIECE_BYTES / width).max(1)),
        Order::Block(order) => {
            let per_block = samples.layout(options.order).most_windows().max(1);
            let open = order.open_blocks_of_stream() * u64::from(order.streams.max(1));
            ((per_block * open).min(count), per_block)
        }
    };
    let batch = options.batch.max(1) as u64;
    let batches = BATCHES.min(count / batch).max(1);
    let mut distinct = 0;
    let mut order = order_of(samples, &LoaderOptions { share: Default::default(), ..options.clone() }, 0)?;
    for _ in 0..batches {
        let blocks: HashSet<u64> =
            order.by_ref().take(batch as usize).map(|s| s.window / per_block).collect();
        distinct += blocks.len() as u64;
    }
    let means = means(samples)?;
    let (runs, by_chance, score) = runs(&means);
    Ok(ShuffleReport {
        window_samples,
        window_share: window_samples as f64 / count as f64,
        blocks_in_batch: distinct as f64 / batches as f64,
        most_blocks_in_batch: batch.min(count.div_ceil(per_block)),
        runs,
        runs_by_chance: by_chance,
        runs_score: score,
    })
}

/// The mean token of windows spread evenly over the data.
fn means(samples: &Samples) -> Result<Vec<f64>> {
    let (count, context) = (samples.count(), samples.context());
    let (mut inputs, mut targets) = (vec![0; context], vec![0; context]);
    (0..PROBES.min(count))
        .map(|probe| {
            // In 128 bits, because the product may not fit 64.
            let window = u128::from(probe) * u128::from(count) / u128::from(PROBES.min(count));
            samples.read(window as u64, &mut inputs, &mut targets)?;
            Ok(inputs.iter().map(|&token| f64::from(token)).sum::<f64>() / context as f64)
        })
        .collect()
}

/// The Wald–Wolfowitz test of values against their median: runs, their expectation, and the difference in standard deviations.
fn runs(values: &[f64]) -> (u64, f64, f64) {
    let mut ordered = values.to_vec();
    ordered.sort_by(f64::total_cmp);
    let median = ordered.get(ordered.len() / 2).copied().unwrap_or(0.0);
    let sides: Vec<bool> =
        values.iter().filter(|&&value| value != median).map(|&value| value > median).collect();
    let above = sides.iter().filter(|&&side| side).count() as f64;
    let (below, total) = (sides.len() as f64 - above, sides.len() as f64);
    let runs = sides.chunk_by(|a, b| a == b).count() as u64;
    if above < 1.0 || below < 1.0 || total < 3.0 {
        return (runs, runs as f64, 0.0);
    }
    let mean = 1.0 + 2.0 * above * below / total;
    let variance = (mean - 1.0) * (mean - 2.0) / (total - 1.0);
    (runs, mean, (runs as f64 - mean) / variance.max(f64::MIN_POSITIVE).sqrt())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_tell_sorted_from_shuffled() {
        let sorted: Vec<f64> = (0..256).map(f64::from).collect();
        assert!(runs(&sorted).2 < -15.0);
        let mut random = fastrand::Rng::with_seed(1);
        for _ in 0..50 {
            let shuffled: Vec<f64> = (0..256).map(|_| random.f64()).collect();
            let (found, mean, score) = runs(&shuffled);
            assert!(score.abs() < 5.0 && (found as f64 - mean).abs() < 40.0, "{score}");
        }
        for equal in [&[][..], &[1.0], &[1.0; 100]] {
            assert_eq!(runs(equal).2, 0.0);
        }
    }
}
