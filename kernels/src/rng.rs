//! Philox4x32-10, the counter-based generator behind dropout and stochastic rounding.
//!
//! A draw is a pure function of (key, counter): nothing is stored, replays agree, and the same few lines run on every
//! backend. Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC'11); constants and
//! the test vectors are Random123's.

use crate::op::Dropout;

const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];

/// Four random words for a counter and a key.
#[inline(always)]
pub fn philox4x32(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let (mut c, mut k) = (counter, key);
    for _ in 0..10 {
        let product0 = u64::from(MULTIPLIERS[0]) * u64::from(c[0]);
        let product1 = u64::from(MULTIPLIERS[1]) * u64::from(c[2]);
        c = [
            (product1 >> 32) as u32 ^ c[1] ^ k[0],
            product1 as u32,
            (product0 >> 32) as u32 ^ c[3] ^ k[1],
            product0 as u32,
        ];
        k = [k[0].wrapping_add(WEYL[0]), k[1].wrapping_add(WEYL[1])];
    }
    c
}

/// [`philox4x32`] of the counters `[block low, block high, site, step]` of consecutive blocks: the rounds over arrays, word by
/// word, so that they vectorise.
#[inline(always)]
pub(crate) fn philox4x32_blocks<const BLOCKS: usize>(
    first: u64,
    site: u32,
    step: u32,
    seed: u64,
) -> [[u32; 4]; BLOCKS] {
    let blocks: [u64; BLOCKS] = std::array::from_fn(|i| first + i as u64);
    let (mut c0, mut c1) = (blocks.map(|b| b as u32), blocks.map(|b| (b >> 32) as u32));
    let (mut c2, mut c3) = ([site; BLOCKS], [step; BLOCKS]);
    let mut k = [seed as u32, (seed >> 32) as u32];
    for _ in 0..10 {
        for (((c0, c1), c2), c3) in c0.iter_mut().zip(&mut c1).zip(&mut c2).zip(&mut c3) {
            let product0 = u64::from(MULTIPLIERS[0]) * u64::from(*c0);
            let product1 = u64::from(MULTIPLIERS[1]) * u64::from(*c2);
            (*c0, *c1) = ((product1 >> 32) as u32 ^ *c1 ^ k[0], product1 as u32);
            (*c2, *c3) = ((product0 >> 32) as u32 ^ *c3 ^ k[1], product0 as u32);
        }
        k = [k[0].wrapping_add(WEYL[0]), k[1].wrapping_add(WEYL[1])];
    }
    std::array::from_fn(|i| [c0[i], c1[i], c2[i], c3[i]])
}

impl Dropout {
    /// The factors of elements `4 * block .. 4 * block + 4`: 0 where dropped, `1 / (1 - probability)` where kept.
    #[inline(always)]
    pub fn factors(&self, block: u64) -> [f32; 4] {
        let counter = [block as u32, (block >> 32) as u32, self.site, self.step];
        let words = philox4x32(counter, [self.seed as u32, (self.seed >> 32) as u32]);
        let keep = self.keep();
        let threshold = self.threshold();
        words.map(|word| if word < threshold { 0.0 } else { keep })
    }

    /// The factor of one element; [`Dropout::factors`] gives four at the price of one.
    #[inline(always)]
    pub fn factor(&self, index: u64) -> f32 {
        self.factors(index / 4)[(index % 4) as usize]
    }

    /// The factors of consecutive elements from `first`, several blocks at a time so that the loop vectorises.
    #[inline(always)]
    pub(crate) fn fill_factors(&self, first: u64, factors: &mut [f32]) {
        const BLOCKS: usize = 8;
        let ahead = factors.len().min((first.next_multiple_of(4) - first) as usize);
        let (head, rest) = factors.split_at_mut(ahead);
        head.iter_mut().zip(first..).for_each(|(factor, i)| *factor = self.factor(i));
        let mut block = first.div_ceil(4);
        let mut many = rest.chunks_exact_mut(4 * BLOCKS);
        for factors in &mut many {
            factors.copy_from_slice(self.factors_of::<BLOCKS>(block).as_flattened());
            block += BLOCKS as u64;
        }
        for four in many.into_remainder().chunks_mut(4) {
            four.copy_from_slice(&self.factors(block)[..four.len()]);
            block += 1;
        }
    }

    /// [`Dropout::factors`] of consecutive blocks.
    #[inline(always)]
    fn factors_of<const BLOCKS: usize>(&self, first: u64) -> [[f32; 4]; BLOCKS] {
        let keep = self.keep();
        let threshold = self.threshold();
        philox4x32_blocks::<BLOCKS>(first, self.site, self.step, self.seed)
            .map(|words| words.map(|word| if word < threshold { 0.0 } else { keep }))
    }

    /// What survivors are multiplied by.
    pub(crate) fn keep(&self) -> f32 {
        1.0 / (1.0 - self.probability)
    }

    /// Words below it drop their element: `probability · 2^32`, rounded down; at most 2^32 - 256, since an f32 below 1
    /// is at most 1 - 2^-24.
    #[inline(always)]
    pub(crate) fn threshold(&self) -> u32 {
        (f64::from(self.probability) * 4_294_967_296.0) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random123_vectors() {
        assert_eq!(philox4x32([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(
            philox4x32([u32::MAX; 4], [u32::MAX; 2]),
            [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]
        );
        assert_eq!(
            philox4x32([0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344], [0xa409_3822, 0x299f_31d0]),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

    #[test]
    fn factors_of_a_range_are_those_of_its_elements() {
        let dropout = Dropout { probability: 0.3, seed: 0x0123_4567_89AB_CDEF, site: 5, step: 11 };
        for (first, len) in [(0, 0), (0, 100), (1, 1), (3, 67), (6, 33), ((1 << 34) - 9, 90)] {
            let mut factors = vec![f32::NAN; len];
            dropout.fill_factors(first, &mut factors);
            let expected: Vec<f32> = (first..first + len as u64).map(|i| dropout.factor(i)).collect();
            assert_eq!(factors, expected);
        }
    }

    #[test]
    fn share_dropped_is_the_probability() {
        let dropout = Dropout { probability: 0.1, seed: 7, site: 3, step: 9 };
        let draws = 1_000_000u64;
        let dropped = (0..draws / 4).flat_map(|b| dropout.factors(b)).filter(|&f| f == 0.0).count() as f64;
        // Five standard deviations of a binomial: 5 · √(n p (1 - p)) = 1500.
        assert!((dropped - 0.1 * draws as f64).abs() < 1500.0, "{dropped} of {draws}");
    }
}
