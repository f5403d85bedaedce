//! Which window each sample is.

use crate::{Permutation, Windows};

/// The order of the samples: a pure function of the sample's number, so that the place in the data is that number alone.
///
/// Sample `s` of `n` windows is element `s % n` of epoch `s / n`. Every epoch delivers every window once, in an order of
/// its own; a batch may run on from one epoch into the next.
#[derive(Clone, Debug)]
pub struct Sampler {
    windows: Windows,
    seed: u64,
}

impl Sampler {
    /// The order of `windows` that follows from `seed` and the file's fingerprint.
    pub fn new(windows: Windows, seed: u64) -> Self {
        Self { windows, seed }
    }

    /// The windows.
    pub fn windows(&self) -> &Windows {
        &self.windows
    }

    /// The window that a sample is.
    pub fn window_at(&self, sample: u64) -> u64 {
        let (count, fingerprint) = (self.windows.count(), self.windows.file().fingerprint());
        Permutation::new(count, self.seed, sample / count, fingerprint).get(sample % count)
    }

    /// The epoch that a sample belongs to.
    pub fn epoch_at(&self, sample: u64) -> u64 {
        sample / self.windows.count()
    }
}
