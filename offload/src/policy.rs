//! Where a saved tensor goes, and which segments are computed again.

use std::{fmt, str::FromStr};

use ebbtide_kernels::DType;

use crate::Codec;

/// What a policy is told about a tensor that backward will need.
#[derive(Clone, Copy, Debug)]
pub struct Activation<'a> {
    /// Its name within the model, e.g. `h.3/attn.qkv`.
    pub name: &'a str,
    /// Its shape.
    pub shape: &'a [usize],
    /// Its elements' type.
    pub dtype: DType,
    /// What it is to backward.
    pub role: Role,
    /// The innermost segment that it belongs to.
    pub segment: Option<&'a str>,
    /// It can be made again cheaply from other saved tensors: [`Placement::Rerun`] is allowed.
    pub rerun: bool,
}

impl Activation<'_> {
    /// Elements.
    pub fn len(&self) -> usize {
        self.shape.iter().fold(1, |len: usize, &axis| len.saturating_mul(axis))
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Its size in bytes.
    pub fn bytes(&self) -> usize {
        self.len() * self.dtype.size_bytes()
    }
}

/// What a saved tensor is to backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// The input of a segment that is recomputed.
    Boundary,
    /// What a normalisation normalised.
    NormInput,
    /// The output of a normalisation: elementwise from its input and statistics.
    NormOutput,
    /// What an activation function was given.
    GeluInput,
    /// The output of an activation function: elementwise from its input.
    GeluOutput,
    /// Queries, keys and values, or the attention's output.
    Attention,
    /// Mean, reciprocal deviation, logsumexp: small, and never lossy.
    Statistic,
    /// Elements that are 0 or 1.
    Mask,
    /// Anything else.
    Activation,
}

/// Memory that is not the device's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Tier {
    /// A slab of host memory, pinned where the device copies from such memory alone.
    #[default]
    Host,
    /// A file without a name.
    Disk,
}

impl Tier {
    /// All of them.
    pub const ALL: [Tier; 2] = [Tier::Host, Tier::Disk];
}

impl fmt::Display for Tier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Tier::Host => "host",
            Tier::Disk => "disk",
        })
    }
}

/// Where a saved tensor goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// It stays on the device; unless raw, in fewer bytes.
    Keep(Codec),
    /// It leaves the device and comes back before backward needs it; the link carries the stored form. Where the tier is full
    /// it goes to the next (from the host to the disk), or stays.
    Offload(Tier, Codec),
    /// It is not saved, but made again from others when backward needs it. Only where [`Activation::rerun`] says so;
    /// elsewhere it is kept.
    Rerun,
}

/// What happens to a segment of the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SegmentPlan {
    /// It runs once, and saves what its backward needs.
    Run,
    /// It saves its input alone, and runs again in backward (activation checkpointing).
    Recompute,
    /// As [`SegmentPlan::Run`] while the budget has room for what the segment saves, else as [`SegmentPlan::Recompute`].
    RunIfRoom,
}

/// Decides, for each tensor and each segment. A closure that places tensors is a policy too, which runs each segment once.
pub trait Policy: Send + Sync {
    /// Where a tensor goes.
    fn activation(&self, activation: &Activation<'_>) -> Placement;
    /// Whether a segment runs once or twice.
    fn segment(&self, name: &str) -> SegmentPlan {
        let _ = name;
        SegmentPlan::Run
    }
}

impl<F> Policy for F
where
    F: Fn(&Activation<'_>) -> Placement + Send + Sync,
{
    fn activation(&self, activation: &Activation<'_>) -> Placement {
        self(activation)
    }
}

/// Keeps everything on the device, except what is nearly free to make again: outputs of normalisations.
#[derive(Clone, Copy, Debug, Default)]
pub struct KeepAll;

impl Policy for KeepAll {
    fn activation(&self, activation: &Activation<'_>) -> Placement {
        match activation.role {
            Role::NormOutput => Placement::Rerun,
            _ => Placement::Keep(Codec::Raw),
        }
    }
}

/// Checkpoints every segment: saves its input alone and runs it again in backward.
#[derive(Clone, Copy, Debug, Default)]
pub struct RecomputeSegments;

impl Policy for RecomputeSegments {
    fn activation(&self, activation: &Activation<'_>) -> Placement {
        KeepAll.activation(activation)
    }
    fn segment(&self, _name: &str) -> SegmentPlan {
        SegmentPlan::Recompute
    }
}

/// Sends everything to host memory that is not nearly free to make again.
#[derive(Clone, Copy, Debug, Default)]
pub struct OffloadAll;

impl Policy for OffloadAll {
    fn activation(&self, activation: &Activation<'_>) -> Placement {
        match activation.role {
            Role::NormOutput => Placement::Rerun,
            Role::Statistic => Placement::Keep(Codec::Raw),
            _ => Placement::Offload(Tier::Host, Codec::Raw),
        }
    }
}

/// The built-in policies, by name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Builtin {
    /// [`KeepAll`].
    #[default]
    Keep,
    /// [`RecomputeSegments`].
    Recompute,
    /// [`OffloadAll`].
    Offload,
}

impl Builtin {
    /// All of them.
    pub const ALL: [Builtin; 3] = [Builtin::Keep, Builtin::Offload, Builtin::Recompute];

    /// The policy itself.
    pub fn policy(self) -> Box<dyn Policy> {
        match self {
            Builtin::Keep => Box::new(KeepAll),
            Builtin::Recompute => Box::new(RecomputeSegments),
            Builtin::Offload => Box::new(OffloadAll),
        }
    }
}

impl fmt::Display for Builtin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Builtin::Keep => "keep",
            Builtin::Recompute => "recompute",
            Builtin::Offload => "offload",
        })
    }
}

impl FromStr for Builtin {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        Builtin::ALL
            .into_iter()
            .find(|policy| policy.to_string() == text)
            .ok_or_else(|| format!("unknown policy `{text}`: expected keep, recompute or offload"))
    }
}
