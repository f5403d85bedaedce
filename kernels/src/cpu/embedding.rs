//! Token and position embedding, and its backward.
//!
//! Backward cuts the columns, not the rows, into tasks: each adds all rows of its columns in token order, so no two tasks
//! meet in the tables, however often a token occurs, and the sums do not depend on the thread count.
//!
//! Cost: a read of two rows and a write of one, a token; backward reads one and updates two.

use multiversion::multiversion;

use super::{
    elementwise::drop_piece,
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
    wte: &[f32],
    wpe: &[f32],
    out: &mut [f32],
    shape: EmbeddingShape,
    dropout: Option<Dropout>,
) -> Result<(), String> {
    check(tokens, shape)?;
    let width = shape.width;
    let out_bytes = size_of_val(out);
    let out = Parts::new(out);
    threads.for_each(tokens.len(), out_bytes, |row| {
        let (token, position) = (tokens[row] as usize, row % shape.context);
        // SAFETY: each row belongs to one task.
        let out = unsafe { out.slice(row * width, width) };
        add(&wte[token * width..][..width], &wpe[position * width..][..width], out);
        if let Some(dropout) = &dropout {
            drop_piece(out, (row * width) as u64, dropout);
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
    dout: &[f32],
    dwte: &mut [f32],
    dwpe: &mut [f32],
    shape: EmbeddingShape,
    dropout: Option<Dropout>,
) -> Result<(), String> {
    check(tokens, shape)?;
    let width = shape.width;
    let (dwte, dwpe) = (Parts::new(dwte), Parts::new(dwpe));
    threads.for_each(width.div_ceil(COLUMNS), size_of_val(dout), |task| {
        let first = task * COLUMNS;
        let columns = COLUMNS.min(width - first);
        let mut gradient = [0.0; COLUMNS];
        let gradient = &mut gradient[..columns];
        for (row, &token) in tokens.iter().enumerate() {
            let at = row * width + first;
            gradient.copy_from_slice(&dout[at..at + columns]);
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
