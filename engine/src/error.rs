//! What can go wrong in the engine.

use std::path::PathBuf;

/// Result of the engine.
pub type Result<T, E = Error> = std::result::Result<T, E>;

fn not_finite(first: &Option<String>) -> String {
    match first {
        Some(name) => format!("the first tensor that is not finite is `{name}`"),
        None => "no tensor was found that is not".to_string(),
    }
}

/// An error of the engine. Fields hold the facts; the message names them all.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The device layer's.
    #[error(transparent)]
    Device(#[from] ebbtide_kernels::Error),
    /// An operation was given a tensor of the wrong shape.
    #[error("{op}: expected {expected}, found {found}")]
    Shape {
        /// The operation.
        op: &'static str,
        /// The shape or relation that it needs.
        expected: String,
        /// What it was given.
        found: String,
    },
    /// A segment that a policy recomputes gave something else the second time.
    #[error(
        "segment `{segment}` is not reproducible: its output was {first} in the forward pass and {second} when recomputed"
    )]
    NotReproducible {
        /// The segment.
        segment: String,
        /// The first output's shape, and its checksum if values are verified.
        first: String,
        /// The second's.
        second: String,
    },
    /// The loss scale is at its floor, and gradients overflow all the same.
    #[error(
        "{skips} updates in a row were skipped at a loss scale of {scale}, its floor: {}",
        not_finite(first)
    )]
    Overflow {
        /// Updates skipped in a row.
        skips: u32,
        /// The scale.
        scale: f32,
        /// The first tensor that is not finite.
        first: Option<String>,
    },
    /// Something that a model made in 16 bits is not finite.
    #[error("{what} is not finite: {}", not_finite(first))]
    NotFinite {
        /// What was wanted: a loss, logits.
        what: &'static str,
        /// The first tensor that is not.
        first: Option<String>,
    },
    /// A configuration that cannot be.
    #[error("{field}: expected {expected}, found {found}")]
    Config {
        /// The field.
        field: &'static str,
        /// What would do.
        expected: String,
        /// What it is.
        found: String,
    },
    /// There is no parameter of that name.
    #[error("no parameter `{name}` in the model")]
    UnknownParameter {
        /// The name.
        name: String,
    },
    /// A file is not what it should be.
    #[error("{path}: {message}")]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong with it: where, what was expected, what was found.
        message: String,
    },
    /// The system refused an operation on a file.
    #[error("{path}: cannot {action}: {reason}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The operation.
        action: &'static str,
        /// The system's reason.
        reason: std::io::Error,
    },
}
