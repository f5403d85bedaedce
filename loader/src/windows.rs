//! A range of a token file as windows of a fixed context, and the split into training and validation.
//!
//! Window `i` begins `i * context` tokens into the range and has one token more than the context, so that the inputs of
//! all windows are disjoint and each target is the token after its input. What is left at the end is not used.

use std::ops::Range;

use crate::{Error, Result, TokenFile};

/// Windows of `context + 1` tokens over a range of a file. A clone is cheap.
#[derive(Clone, Debug)]
pub struct Windows {
    file: TokenFile,
    tokens: Range<u64>,
    context: usize,
}

impl Windows {
    /// The windows of `context` inputs over `tokens`.
    ///
    /// # Errors
    ///
    /// [`Error::BadContext`] for a context of 0, [`Error::OutOfRange`] if the range is reversed or reaches beyond the file,
    /// and [`Error::TooShort`] if it has fewer than `context + 1` tokens.
    pub fn new(file: &TokenFile, tokens: Range<u64>, context: usize) -> Result<Self> {
        Self::part(file, tokens, context, "range")
    }

    fn part(file: &TokenFile, tokens: Range<u64>, context: usize, part: &'static str) -> Result<Self> {
        if context == 0 {
            return Err(Error::BadContext { path: file.path().to_path_buf() });
        }
        file.check_range(tokens.start, tokens.end)?;
        let (found, needed) = (tokens.end - tokens.start, window_tokens(context));
        if found < needed {
            return Err(Error::TooShort {
                path: file.path().to_path_buf(),
                part,
                start: tokens.start,
                end: tokens.end,
                tokens: file.len(),
                found,
                needed,
                context,
            });
        }
        Ok(Self { file: file.clone(), tokens, context })
    }

    /// How many windows there are, at least one.
    pub fn count(&self) -> u64 {
        (self.tokens.end - self.tokens.start - 1) / self.context as u64
    }

    /// Inputs of one window.
    pub fn context(&self) -> usize {
        self.context
    }

    /// The range of the file.
    pub fn tokens(&self) -> Range<u64> {
        self.tokens.clone()
    }

    /// The file.
    pub fn file(&self) -> &TokenFile {
        &self.file
    }

    /// Reads window `index`: its first `context` tokens into `inputs`, its last `context` into `targets`. After an error
    /// what the slices hold is unspecified.
    ///
    /// # Errors
    ///
    /// [`Error::BadSlice`] unless both slices have `context` elements, [`Error::NoSuchWindow`] for an index of
    /// [`count`](Self::count) or more, and the errors of [`TokenFile::read`].
    pub fn read(&self, index: u64, inputs: &mut [u32], targets: &mut [i32]) -> Result<()> {
        for (slice, found) in [("inputs", inputs.len()), ("targets", targets.len())] {
            if found != self.context {
                return Err(Error::BadSlice { slice, expected: self.context, found });
            }
        }
        let start = self.start(index)?;
        // The targets' own bytes hold the tokens until they are widened, which spares a buffer: a window of `context + 1`
        // halves of a word is never longer than `context` words.
        let window = &mut bytemuck::cast_slice_mut::<i32, u16>(targets)[..self.context + 1];
        self.file.read(start, window)?;
        let last = window[self.context];
        for (input, &token) in inputs.iter_mut().zip(&*window) {
            *input = u32::from(token);
        }
        for (target, &input) in targets.iter_mut().zip(&inputs[1..]) {
            *target = input as i32;
        }
        targets[self.context - 1] = i32::from(last);
        Ok(())
    }

    /// Tells the kernel that a window will be read soon.
    pub(crate) fn advise(&self, index: u64) {
        if let Ok(start) = self.start(index) {
            self.file.advise(start, window_tokens(self.context));
        }
    }

    /// The first token of a window.
    fn start(&self, index: u64) -> Result<u64> {
        if index >= self.count() {
            let path = self.file.path().to_path_buf();
            return Err(Error::NoSuchWindow { path, index, count: self.count() });
        }
        Ok(self.tokens.start + index * self.context as u64)
    }
}

/// Cuts the tail of a file off for validation: the windows of training, and those of validation unless the fraction is 0.
/// The two share no token. Validation gets `validation_fraction` of the tokens, rounded down, but at least one window.
///
/// # Errors
///
/// [`Error::BadFraction`] unless the fraction is in `[0, 1)`, and the errors of [`Windows::new`], where
/// [`Error::TooShort`] names the part that has too few tokens.
pub fn split(
    file: &TokenFile,
    validation_fraction: f64,
    context: usize,
) -> Result<(Windows, Option<Windows>)> {
    if !(0.0..1.0).contains(&validation_fraction) {
        return Err(Error::BadFraction { fraction: validation_fraction });
    }
    let validation_tokens = if validation_fraction > 0.0 {
        ((file.len() as f64 * validation_fraction) as u64).max(window_tokens(context)).min(file.len())
    } else {
        0
    };
    let cut = file.len() - validation_tokens;
    // Validation first: where it does not get its one window, training has nothing at all.
    let validation = match validation_tokens {
        0 => None,
        _ => Some(Windows::part(file, cut..file.len(), context, "validation part")?),
    };
    Ok((Windows::part(file, 0..cut, context, "training part")?, validation))
}

/// Tokens of one window.
fn window_tokens(context: usize) -> u64 {
    (context as u64).saturating_add(1)
}
