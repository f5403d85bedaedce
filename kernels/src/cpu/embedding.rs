//! Token and position embedding, and its backward.
//!
//! Backward cuts the columns, not the rows, into tasks: each adds all rows of its columns in token order, so no two tasks
//! meet in the tables, however often a token occurs, and the sums do not depend on the thread count.
//!
//! Cost: a read of two rows and a write of one, a token; backward reads one and updates two.

use multiversion::multiversion;

use super::{
    elementwise::drop_piece,
    float::{FloatParts, Floats},
    threads::{Parts, Threads},
};
use crate::op::Dropout;

/// Columns that a task of the backward pass covers: eight cache lines, and whole blocks of the dropout's generator.
const COLUMNS: usize = 128;

/// Sizes of an embedding.
#[derive(Clone, Copy)]
pub(crate) struct EmbeddingShape {
    pub(crate) context: usize,
    pub(crate) width: usize,
    pub(crate) vocabulary: usize,
}

/// See [`crate::op::Embedding`].
///
/// # Errors
/// Names the first id outside of the table, and its place.
pub(crate) fn embedding(
    threads: &Threads,
    tokens: &[u32],
    wte: Floats<'_>,
    wpe: Floats<'_>,
    out: &FloatParts<'_>,
    shape: EmbeddingShape,
    dropout: Option<Dropout>,
) -> Result<(), String> {
    check(tokens, shape)?;
    let width = shape.width;
    threads.for_each(tokens.len(), 4 * out.len(), |row| {
        let (token, position) = (tokens[row] as usize, row % shape.context);
        let (mut of_token, mut of_position) = (Vec::new(), Vec::new());
        let of_token = wte.part(token * width..(token + 1) * width, &mut of_token);
        let of_position = wpe.part(position * width..(position + 1) * width, &mut of_position);
        // SAFETY: each row belongs to one task.
        unsafe {
            out.write(row * width..(row + 1) * width, &mut Vec::new(), |out| {
                add(of_token, of_position, out);
                if let Some(dropout) = &dropout {
                    drop_piece(out, (row * width) as u64, dropout);
                }
            });
        }
    });
    Ok(())
}

/// See [`crate::op::EmbeddingBackward`].
///
/// # Errors
/// As for [`embedding`].
pub(crate) fn embedding_backward(
    threads: &Threads,
    tokens: &[u32],
    dout: Floats<'_>,
    dwte: &mut [f32],
    dwpe: &mut [f32],
    shape: EmbeddingShape,
    dropout: Option<Dropout>,
) -> Result<(), String> {
    check(tokens, shape)?;
    let width = shape.width;
    let (dwte, dwpe) = (Parts::new(dwte), Parts::new(dwpe));
    threads.for_each(width.div_ceil(COLUMNS), dout.bytes(), |task| {
        let first = task * COLUMNS;
        let columns = COLUMNS.min(width - first);
        let mut gradient = [0.0; COLUMNS];
        let gradient = &mut gradient[..columns];
        for (row, &token) in tokens.iter().enumerate() {
            let at = row * width + first;
            dout.widen(at..at + columns, gradient);
            if let Some(dropout) = &dropout {
                drop_piece(gradient, at as u64, dropout);
            }
            // SAFETY: each column of the tables belongs to one task.
            let (of_token, of_position) = unsafe {
                (
                    dwte.slice(token as usize * width + first, columns),
                    dwpe.slice(row % shape.context * width + first, columns),
                )
            };
            of_token.iter_mut().zip(&*gradient).for_each(|(sum, g)| *sum += g);
            of_position.iter_mut().zip(&*gradient).for_each(|(sum, g)| *sum += g);
        }
    });
    Ok(())
}

fn check(tokens: &[u32], shape: EmbeddingShape) -> Result<(), String> {
    match tokens.iter().position(|&token| token as usize >= shape.vocabulary) {
        Some(index) => Err(format!(
            "token {} at index {index} is outside of the vocabulary of {}",
            tokens[index], shape.vocabulary
        )),
        None => Ok(()),
    }
}

#[multiversion(targets("x86_64+avx2+fma"))]
fn add(a: &[f32], b: &[f32], out: &mut [f32]) {
    out.iter_mut().zip(a).zip(b).for_each(|((out, a), b)| *out = a + b);
}
