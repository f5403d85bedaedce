//! Masks as bits, eight elements a byte. Cost: memory traffic.

use multiversion::multiversion;

use super::{elementwise::each_piece, threads::Threads};

/// See [`crate::Op::BitsEncode`].
pub(crate) fn bits_encode(threads: &Threads, input: &[u8], out: &mut [u8]) {
    each_piece(threads, out, |first, out| {
        let input = &input[8 * first..input.len().min(8 * (first + out.len()))];
        encode_piece(input, out);
    });
}

#[multiversion(targets("x86_64+avx2"))]
fn encode_piece(input: &[u8], out: &mut [u8]) {
    let (whole, rest) = input.as_chunks::<8>();
    let pack = |elements: &[u8]| {
        elements.iter().enumerate().fold(0, |byte, (bit, &element)| byte | u8::from(element != 0) << bit)
    };
    out.iter_mut().zip(whole).for_each(|(out, elements)| *out = pack(elements));
    if !rest.is_empty() {
        out[whole.len()] = pack(rest);
    }
}

/// See [`crate::Op::BitsDecode`].
pub(crate) fn bits_decode(threads: &Threads, input: &[u8], out: &mut [u8]) {
    // Pieces begin at multiples of 8.
    each_piece(threads, out, |first, out| decode_piece(&input[first / 8..], out));
}

#[multiversion(targets("x86_64+avx2"))]
fn decode_piece(input: &[u8], out: &mut [u8]) {
    let (whole, rest) = out.as_chunks_mut::<8>();
    // Eight copies of the byte, of each another bit, which is then moved down.
    let spread = |byte: u8| {
        let copies = (u64::from(byte) * 0x0101_0101_0101_0101) & 0x8040_2010_0804_0201;
        (((copies + 0x7F7F_7F7F_7F7F_7F7F) >> 7) & 0x0101_0101_0101_0101).to_le_bytes()
    };
    whole.iter_mut().zip(input).for_each(|(elements, &byte)| *elements = spread(byte));
    if let Some(&byte) = input.get(whole.len()) {
        rest.copy_from_slice(&spread(byte)[..rest.len()]);
    }
}
