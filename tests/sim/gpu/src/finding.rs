//! Broken rules.

use std::fmt;

/// Which rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FindingKind {
    /// Two ops use the same bytes, one of them writes, and nothing orders them.
    Race,
    /// A kernel broke a rule of its own: bounds, alignment, initialisation, barriers.
    Kernel,
    /// A copy or a fill outside of every allocation, or over the end of one.
    OutOfBounds,
    /// A copy of device memory that was never written.
    Uninitialised,
    /// An asynchronous copy whose host memory is not pinned, or not in one piece.
    Unpinned,
    /// The host changed what a queued copy was still to read.
    HostWrote,
    /// Memory that was freed while an op that uses it was not known to be done.
    FreedInUse,
    /// A handle or an address that is not there, any more or ever.
    Stray,
    /// What was not given back when the device was closed.
    Leak,
    /// A wait that can never end.
    Deadlock,
}

/// A broken rule.
#[derive(Clone, Debug, PartialEq)]
pub struct Finding {
    /// Which.
    pub kind: FindingKind,
    /// What happened, with ops, streams and addresses.
    pub what: String,
}

impl Finding {
    pub(crate) fn new(kind: FindingKind, what: impl Into<String>) -> Self {
        Finding { kind, what: what.into() }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}", self.kind, self.what)
    }
}
