//! Operands of any float type, to kernels that compute in f32.
//!
//! A kernel asks for a part as f32: f32 elements are borrowed where they lie, 16-bit ones are converted into a scratch buffer
//! (by F16C or AVX-512 where the machine has them: the `half` crate chooses at run time). What a kernel writes is rounded once,
//! to nearest even, when it is done with a part.

use std::ops::Range;

use half::{bf16, f16, slice::HalfFloatSliceExt};

use super::threads::Parts;

/// Floats to read.
#[derive(Clone, Copy)]
pub(crate) enum Floats<'a> {
    F32(&'a [f32]),
    F16(&'a [f16]),
    BF16(&'a [bf16]),
}

impl<'a> Floats<'a> {
    pub(crate) fn len(&self) -> usize {
        match self {
            Floats::F32(slice) => slice.len(),
            Floats::F16(slice) => slice.len(),
            Floats::BF16(slice) => slice.len(),
        }
    }

    /// Size in bytes.
    pub(crate) fn bytes(&self) -> usize {
        match self {
            Floats::F32(slice) => size_of_val(*slice),
            Floats::F16(slice) => size_of_val(*slice),
            Floats::BF16(slice) => size_of_val(*slice),
        }
    }

    /// A part as f32: where it lies, or in `scratch`.
    pub(crate) fn part<'s>(&self, range: Range<usize>, scratch: &'s mut Vec<f32>) -> &'s [f32]
    where
        'a: 's,
    {
        if let Floats::F32(slice) = self {
            return &slice[range];
        }
        scratch.resize(range.len(), 0.0);
        self.widen(range, scratch);
        scratch
    }

    /// Converts a part.
    pub(crate) fn widen(&self, range: Range<usize>, out: &mut [f32]) {
        match self {
            Floats::F32(slice) => out.copy_from_slice(&slice[range]),
            Floats::F16(slice) => slice[range].convert_to_f32_slice(out),
            Floats::BF16(slice) => slice[range].convert_to_f32_slice(out),
        }
    }
}

/// Floats that the pieces of one kernel write at once, each its own part.
pub(crate) enum FloatParts<'a> {
    F32(Parts<'a, f32>),
    F16(Parts<'a, f16>),
    BF16(Parts<'a, bf16>),
}

impl<'a> From<&'a mut [f32]> for FloatParts<'a> {
    fn from(slice: &'a mut [f32]) -> Self {
        FloatParts::F32(Parts::new(slice))
    }
}

impl FloatParts<'_> {
    pub(crate) fn len(&self) -> usize {
        match self {
            FloatParts::F32(parts) => parts.len(),
            FloatParts::F16(parts) => parts.len(),
            FloatParts::BF16(parts) => parts.len(),
        }
    }

    /// Hands a part as f32 to `work` to overwrite. 16-bit elements pass through `scratch`, whose content is no one's.
    ///
    /// # Safety
    /// While this runs nothing else touches these elements.
    pub(crate) unsafe fn write<R>(
        &self,
        range: Range<usize>,
        scratch: &mut Vec<f32>,
        work: impl FnOnce(&mut [f32]) -> R,
    ) -> R {
        // SAFETY: the caller's contract.
        unsafe { self.with(range, scratch, false, work) }
    }

    /// Hands a part as f32 to `work` to read and write.
    ///
    /// # Safety
    /// As for [`FloatParts::write`].
    pub(crate) unsafe fn update<R>(
        &self,
        range: Range<usize>,
        scratch: &mut Vec<f32>,
        work: impl FnOnce(&mut [f32]) -> R,
    ) -> R {
        // SAFETY: the caller's contract.
        unsafe { self.with(range, scratch, true, work) }
    }

    /// Hands a part as f32 to `work` to read, as it is stored.
    ///
    /// # Safety
    /// While this runs nobody writes these elements.
    pub(crate) unsafe fn read<R>(
        &self,
        range: Range<usize>,
        scratch: &mut Vec<f32>,
        work: impl FnOnce(&[f32]) -> R,
    ) -> R {
        let (first, len) = (range.start, range.len());
        // SAFETY: the caller's contract.
        let stored = unsafe {
            match self {
                FloatParts::F32(parts) => Floats::F32(parts.slice(first, len)),
                FloatParts::F16(parts) => Floats::F16(parts.slice(first, len)),
                FloatParts::BF16(parts) => Floats::BF16(parts.slice(first, len)),
            }
        };
        work(stored.part(0..len, scratch))
    }

    unsafe fn with<R>(
        &self,
        range: Range<usize>,
        scratch: &mut Vec<f32>,
        reads: bool,
        work: impl FnOnce(&mut [f32]) -> R,
    ) -> R {
        let (first, len) = (range.start, range.len());
        // SAFETY: the caller's contract.
        unsafe {
            match self {
                FloatParts::F32(parts) => work(parts.slice(first, len)),
                FloatParts::F16(parts) => through(parts.slice(first, len), scratch, reads, work),
                FloatParts::BF16(parts) => through(parts.slice(first, len), scratch, reads, work),
            }
        }
    }
}

fn through<T, R>(
    slice: &mut [T],
    scratch: &mut Vec<f32>,
    reads: bool,
    work: impl FnOnce(&mut [f32]) -> R,
) -> R
where
    [T]: HalfFloatSliceExt,
{
    scratch.resize(slice.len(), 0.0);
    if reads {
        slice.convert_to_f32_slice(scratch);
    }
    let result = work(scratch);
    slice.convert_from_f32_slice(scratch);
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_rounded_once_and_the_rest_stays() {
        let mut data = [1.0f32, 2.0, 3.0, 4.0].map(f16::from_f32);
        let parts = FloatParts::F16(Parts::new(&mut data));
        let mut scratch = Vec::new();
        // SAFETY: one part at a time.
        unsafe {
            parts.update(1..3, &mut scratch, |x| x.iter_mut().for_each(|x| *x += 1.0 / 4096.0));
            parts.write(3..4, &mut scratch, |x| x[0] = 1e6);
        }
        assert_eq!(data.map(f16::to_f32), [1.0, 2.0, 3.0, f32::INFINITY]);
        let read = Floats::F16(&data);
        assert_eq!((read.len(), read.bytes(), read.part(0..2, &mut scratch)), (4, 8, &[1.0, 2.0][..]));
        let plain = [0.5f32, 0.25];
        assert!(std::ptr::eq(Floats::F32(&plain).part(0..2, &mut scratch), &plain[..]), "borrowed");
    }
}
