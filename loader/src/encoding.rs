//! How tokens are stored: the width, sign and byte order of a number.

use std::fmt;

/// The numbers that a file of tokens is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Encoding {
    /// Bytes of one: 1, 2, 4 or 8.
    width: u8,
    signed: bool,
    big_endian: bool,
}

impl Encoding {
    /// Little-endian `u16`, the common one.
    pub const U16: Self = Self { width: 2, signed: false, big_endian: false };
    /// Little-endian `u32`.
    pub const U32: Self = Self { width: 4, signed: false, big_endian: false };

    /// Of a number in Rust, little-endian.
    pub(crate) const fn of(width: u8, signed: bool) -> Self {
        Self { width, signed, big_endian: false }
    }

    /// Whether numbers may be negative.
    pub(crate) fn is_signed(self) -> bool {
        self.signed
    }

    /// An encoding, if the width is 1, 2, 4 or 8 bytes.
    pub(crate) fn new(width: u64, signed: bool, big_endian: bool) -> Option<Self> {
        matches!(width, 1 | 2 | 4 | 8).then_some(Self { width: width as u8, signed, big_endian })
    }

    /// Bytes of a token.
    pub fn bytes(self) -> u64 {
        self.width.into()
    }

    /// Widens a window: its tokens but the last into `inputs`, its tokens but the first into `targets`. `window` has one
    /// token more than either. The index and value of a number that is no token is the error.
    pub(crate) fn widen(
        self,
        window: &[u8],
        inputs: &mut [u32],
        targets: &mut [i32],
    ) -> Result<(), (usize, i128)> {
        match (self.width, self.signed, self.big_endian) {
            (1, false, _) => small(window, inputs, targets, |[byte]: [u8; 1]| byte.into()),
            (2, false, false) => small(window, inputs, targets, |bytes| u16::from_le_bytes(bytes).into()),
            (2, false, true) => small(window, inputs, targets, |bytes| u16::from_be_bytes(bytes).into()),
            (1, true, _) => return any(window, inputs, targets, |bytes| i8::from_le_bytes(bytes).into()),
            (2, true, false) => {
                return any(window, inputs, targets, |bytes| i16::from_le_bytes(bytes).into());
            }
            (2, true, true) => return any(window, inputs, targets, |bytes| i16::from_be_bytes(bytes).into()),
            (4, false, false) => {
                return any(window, inputs, targets, |bytes| u32::from_le_bytes(bytes).into());
            }
            (4, false, true) => {
                return any(window, inputs, targets, |bytes| u32::from_be_bytes(bytes).into());
            }
            (4, true, false) => {
                return any(window, inputs, targets, |bytes| i32::from_le_bytes(bytes).into());
            }
            (4, true, true) => return any(window, inputs, targets, |bytes| i32::from_be_bytes(bytes).into()),
            (_, false, false) => {
                return any(window, inputs, targets, |bytes| u64::from_le_bytes(bytes).into());
            }
            (_, false, true) => {
                return any(window, inputs, targets, |bytes| u64::from_be_bytes(bytes).into());
            }
            (_, true, false) => {
                return any(window, inputs, targets, |bytes| i64::from_le_bytes(bytes).into());
            }
            (_, true, true) => return any(window, inputs, targets, |bytes| i64::from_be_bytes(bytes).into()),
        }
        Ok(())
    }
}

impl fmt::Display for Encoding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sign = if self.signed { 'i' } else { 'u' };
        let order = if self.big_endian && self.width > 1 { ", big-endian" } else { "" };
        write!(f, "{sign}{}{order}", 8 * self.width)
    }
}

/// Numbers that are always tokens.
fn small<const N: usize>(
    window: &[u8],
    inputs: &mut [u32],
    targets: &mut [i32],
    number: impl Fn([u8; N]) -> u32 + Copy,
) {
    let (tokens, _) = window.as_chunks::<N>();
    for (input, &token) in inputs.iter_mut().zip(tokens) {
        *input = number(token);
    }
    for (target, &token) in targets.iter_mut().zip(&tokens[1..]) {
        *target = number(token) as i32;
    }
}

/// Numbers that may be none.
fn any<const N: usize>(
    window: &[u8],
    inputs: &mut [u32],
    targets: &mut [i32],
    number: impl Fn([u8; N]) -> i128,
) -> Result<(), (usize, i128)> {
    let (tokens, _) = window.as_chunks::<N>();
    for (index, &token) in tokens.iter().enumerate() {
        let value = number(token);
        let token = i32::try_from(value).ok().filter(|&token| token >= 0).ok_or((index, value))?;
        if let Some(input) = inputs.get_mut(index) {
            *input = token as u32;
        }
        if index > 0 {
            targets[index - 1] = token;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn widen(encoding: Encoding, window: &[u8]) -> Result<([u32; 1], [i32; 1]), (usize, i128)> {
        let (mut inputs, mut targets) = ([0], [0]);
        encoding.widen(window, &mut inputs, &mut targets).map(|()| (inputs, targets))
    }

    #[test]
    fn every_encoding_is_widened() {
        for width in [1u8, 2, 4, 8] {
            for signed in [false, true] {
                for big_endian in [false, true] {
                    let encoding = Encoding::new(width.into(), signed, big_endian).unwrap();
                    let number = |value: u64| -> Vec<u8> {
                        let mut bytes = value.to_le_bytes()[..width.into()].to_vec();
                        if big_endian {
                            bytes.reverse();
                        }
                        bytes
                    };
                    let large = if width == 1 { 100 } else { 0x1234 };
                    let window = [number(large), number(7)].concat();
                    assert_eq!(widen(encoding, &window), Ok(([large as u32], [7])), "{encoding}");
                    let bad = widen(encoding, &[number(7), number(u64::MAX)].concat());
                    match (signed, width) {
                        (true, _) => assert_eq!(bad, Err((1, -1))),
                        (false, 4) => assert_eq!(bad, Err((1, u32::MAX.into()))),
                        (false, 8) => assert_eq!(bad, Err((1, u64::MAX.into()))),
                        _ => assert!(bad.is_ok()),
                    }
                }
            }
        }
        assert_eq!(Encoding::new(3, false, false), None);
    }
}
