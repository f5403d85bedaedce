//! What can go wrong: a text that is not understood, a launch that does not fit its kernel, a kernel that breaks a rule.

use std::fmt;

/// Why a module was not loaded or a kernel not run to its end.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// PTX that is not understood; `line` counts in the PTX text, from 1.
    #[error("PTX line {line}: {what}")]
    Text {
        /// Line of the PTX text.
        line: usize,
        /// What was found there.
        what: String,
    },
    /// The module has no kernel of this name.
    #[error("no kernel {name:?}; the module has {known}")]
    Unknown {
        /// The name asked for.
        name: String,
        /// The names there are.
        known: String,
    },
    /// Grid, block, shared memory or arguments that the kernel does not take.
    #[error("launch of {kernel}: {what}")]
    Launch {
        /// The kernel.
        kernel: String,
        /// What does not fit, expected and found.
        what: String,
    },
    /// The kernel broke a rule while it ran. Its writes up to there stand.
    #[error("{0}")]
    Fault(Fault),
}

/// A rule that a running kernel broke.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FaultKind {
    /// An access outside of every allocation, or over the end of one.
    OutOfBounds,
    /// An address that is not a multiple of the access's size.
    Misaligned,
    /// A read of bytes that were never written.
    Uninitialised,
    /// Two accesses to the same bytes, one of them a write, with nothing that orders them.
    Race,
    /// A use of bytes that a `cp.async` still writes.
    InFlight,
    /// A warp collective or barrier that a lane named by it never reaches.
    MissingLane,
    /// Warps that wait at barriers for ever.
    Deadlock,
    /// The kernel ran `trap`.
    Trap,
    /// More instructions than the launch's limit.
    TooLong,
}

/// A broken rule and its place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// Which rule.
    pub kind: FaultKind,
    /// What happened, with addresses and threads.
    pub what: String,
    /// The kernel's name.
    pub kernel: String,
    /// The source file, if the PTX has line information.
    pub file: String,
    /// The source line, or 0.
    pub line: u32,
    /// `blockIdx`.
    pub block: [u32; 3],
    /// `threadIdx`, where one thread is to blame.
    pub thread: Option<[u32; 3]>,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} in {} at {}:{}, block {:?}", self.what, self.kernel, self.file, self.line, self.block)?;
        self.thread.map_or(Ok(()), |thread| write!(f, ", thread {thread:?}"))
    }
}

/// A fault before its place is known.
#[derive(Debug, Clone)]
pub struct Problem {
    pub(crate) kind: FaultKind,
    pub(crate) what: String,
    pub(crate) lane: Option<usize>,
}

impl Problem {
    /// A broken rule, for implementations of [`crate::Memory`].
    pub fn new(kind: FaultKind, what: impl Into<String>) -> Self {
        Self { kind, what: what.into(), lane: None }
    }

    pub(crate) fn at(mut self, lane: usize) -> Self {
        self.lane = Some(lane);
        self
    }

    /// Which rule was broken.
    pub fn kind(&self) -> FaultKind {
        self.kind
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)
    }
}

impl std::error::Error for Problem {}
