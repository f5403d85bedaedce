//! A shuffle that needs no memory.
//!
//! A Feistel network is a bijection of the numbers of an even count of bits whatever its round function is. Over the
//! smallest such domain that holds `0..n`, at most four times `n`, it is walked from `i` until it lands below `n` again
//! (cycle walking, Black and Rogaway, "Ciphers with arbitrary finite domains", 2002), which makes it a bijection of
//! `0..n`. The walk ends because it follows a cycle through `i` itself, and takes fewer than four steps on average.
//!
//! The round function is the finaliser of SplitMix64 (Steele, Lea and Flood, 2014), keyed for each round. It shuffles
//! well and hides nothing: this is no cipher.

/// Rounds of the network. Four make a good shuffle of large domains; tiny ones, whose halves have one bit, need more.
const ROUNDS: usize = 8;
/// SplitMix64's increment.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// A seeded bijection of `0..n` in constant memory: the order of one epoch.
///
/// A pure function of its arguments: the same on every machine and in every version of this crate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Permutation {
    n: u64,
    /// Bits of one half of the domain.
    half_bits: u32,
    keys: [u64; ROUNDS],
}

impl Permutation {
    /// The bijection of `0..n` for one epoch of the dataset with this fingerprint. An `n` of 0 counts as 1.
    pub fn new(n: u64, seed: u64, epoch: u64, fingerprint: u64) -> Self {
        let n = n.max(1);
        let bits = u64::BITS - (n - 1).leading_zeros();
        // Each argument goes through the mixer before the next joins, so that swapping two of them gives another order.
        let key = [seed, epoch, fingerprint].iter().fold(0, |key, &part| mix(key ^ part));
        let keys = std::array::from_fn(|round| mix(key.wrapping_add(GOLDEN.wrapping_mul(round as u64 + 1))));
        Self { n, half_bits: bits.div_ceil(2), keys }
    }

    /// Where `i` goes. An `i` of `n` or more counts as `i % n`.
    pub fn get(&self, i: u64) -> u64 {
        let mut at = i % self.n;
        loop {
            at = self.encrypt(at);
            if at < self.n {
                return at;
            }
        }
    }

    /// What goes to `image`: `inverse(get(i)) == i` for every `i` below `n`. An image of `n` or more counts as `image % n`.
    pub fn inverse(&self, image: u64) -> u64 {
        let mut at = image % self.n;
        loop {
            at = self.decrypt(at);
            if at < self.n {
                return at;
            }
        }
    }

    /// One pass through the network, a bijection of the numbers of `2 * half_bits` bits.
    fn encrypt(&self, at: u64) -> u64 {
        let mask = (1 << self.half_bits) - 1;
        let (left, right) = self.keys.iter().fold((at >> self.half_bits, at & mask), |(left, right), key| {
            (right, left ^ (mix(right ^ key) & mask))
        });
        left << self.half_bits | right
    }

    /// One pass back.
    fn decrypt(&self, at: u64) -> u64 {
        let mask = (1 << self.half_bits) - 1;
        let (left, right) =
            self.keys.iter().rev().fold((at >> self.half_bits, at & mask), |(left, right), key| {
                (right ^ (mix(left ^ key) & mask), left)
            });
        left << self.half_bits | right
    }
}

/// A step of SplitMix64: the increment, then the finaliser. The increment keeps 0 from staying 0.
pub(crate) fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(GOLDEN);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn is_a_bijection(n in 1u64..2000, seed: u64, epoch: u64, fingerprint: u64) {
            let order = Permutation::new(n, seed, epoch, fingerprint);
            let mut images: Vec<_> = (0..n).map(|i| order.get(i)).collect();
            images.sort_unstable();
            prop_assert!(images.into_iter().eq(0..n));
        }

        #[test]
        fn the_inverse_undoes_it(n in 1u64.., i: u64, seed: u64, epoch: u64) {
            let order = Permutation::new(n, seed, epoch, 5);
            prop_assert_eq!(order.inverse(order.get(i % n)), i % n);
        }

        #[test]
        fn large_domains_stay_in_range_and_injective(
            n in prop_oneof![(1u64 << 40) - 5..(1 << 40) + 5, u64::MAX - 3..=u64::MAX, (1u64 << 63) - 1..(1 << 63) + 2],
            seed: u64,
        ) {
            let order = Permutation::new(n, seed, 3, 4);
            // Both ends and a spread between them.
            let sample: HashSet<_> = (0..500).flat_map(|i| [i, n - 1 - i, n / 500 * i + 1000]).collect();
            let images: HashSet<_> = sample.iter().map(|&i| order.get(i)).collect();
            prop_assert!(images.iter().all(|&image| image < n));
            prop_assert_eq!(images.len(), sample.len());
        }
    }

    /// Values of a second implementation, in Python. Runs that are resumed by a later version hang on them.
    #[test]
    fn order_never_changes() {
        let first = |n, seed, epoch, fingerprint| -> Vec<u64> {
            let order = Permutation::new(n, seed, epoch, fingerprint);
            (0..n.min(8)).map(|i| order.get(i)).collect()
        };
        assert_eq!(first(1, 0, 0, 0), [0]);
        assert_eq!(first(2, 0, 0, 0), [1, 0]);
        assert_eq!(first(3, 1, 2, 3), [2, 1, 0]);
        assert_eq!(first(10, 1337, 0, 0xdead_beef), [3, 6, 1, 9, 5, 4, 0, 2]);
        assert_eq!(first(10, 1337, 1, 0xdead_beef), [4, 2, 6, 1, 3, 5, 8, 9]);
        assert_eq!(first(1000, u64::MAX, u64::MAX, u64::MAX), [314, 692, 354, 618, 348, 9, 635, 457]);
        assert_eq!(first((1 << 40) - 1, 7, 5, 9)[..3], [1024125992627, 293486036005, 210376420687]);
        assert_eq!(first(u64::MAX, 42, 0, 1)[..2], [882585060296074469, 16758080787399485144]);
    }

    #[test]
    fn degenerate_arguments_have_a_meaning() {
        assert_eq!(Permutation::new(0, 1, 2, 3).get(7), 0);
        let order = Permutation::new(10, 1, 2, 3);
        assert_eq!(order.get(13), order.get(3));
    }

    #[test]
    fn each_argument_changes_the_order() {
        let order = |seed, epoch, fingerprint| -> Vec<u64> {
            (0..100).map(|i| Permutation::new(100, seed, epoch, fingerprint).get(i)).collect()
        };
        let orders: HashSet<_> =
            [(1, 2, 3), (2, 1, 3), (1, 3, 2), (1, 2, 4), (0, 0, 0)].map(|(a, b, c)| order(a, b, c)).into();
        assert_eq!(orders.len(), 5);
    }

    #[test]
    fn every_place_is_as_likely() {
        // Over many epochs each of n elements should come at each place once in n times. The count is binomial; six of its
        // standard deviations allow one false alarm in 5e8 a cell, and the seeds are fixed.
        const EPOCHS: u64 = 20_000;
        for n in [2u64, 3, 4, 5, 6, 7, 17] {
            let mut counts = vec![vec![0u64; n as usize]; n as usize];
            for epoch in 0..EPOCHS {
                let order = Permutation::new(n, 1, epoch, 2);
                for i in 0..n {
                    counts[i as usize][order.get(i) as usize] += 1;
                }
            }
            let expected = EPOCHS as f64 / n as f64;
            let deviation = (expected * (1.0 - 1.0 / n as f64)).sqrt();
            for count in counts.into_iter().flatten() {
                assert!((count as f64 - expected).abs() < 6.0 * deviation, "n {n}: {count} of {expected}");
            }
        }
    }
}
