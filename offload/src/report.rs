//! What the runtime did: bytes by tier and codec, and times.

use std::{collections::BTreeMap, fmt, ops::AddAssign};

use crate::Tier;

/// A codec without its parameters: what bytes are accounted by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum CodecKind {
    /// See [`crate::Codec::Raw`].
    Raw,
    /// See [`crate::Codec::F16`].
    F16,
    /// See [`crate::Codec::BF16`].
    BF16,
    /// See [`crate::Codec::Int8`].
    Int8,
    /// See [`crate::Codec::Bits`].
    Bits,
}

impl CodecKind {
    /// All of them.
    pub const ALL: [CodecKind; 5] =
        [CodecKind::Raw, CodecKind::F16, CodecKind::BF16, CodecKind::Int8, CodecKind::Bits];
}

impl fmt::Display for CodecKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            CodecKind::Raw => "raw",
            CodecKind::F16 => "f16",
            CodecKind::BF16 => "bf16",
            CodecKind::Int8 => "int8",
            CodecKind::Bits => "bits",
        })
    }
}

/// Bytes moved, in stored form.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moved {
    /// From the device.
    pub out_bytes: u64,
    /// To the device.
    pub in_bytes: u64,
}

/// Bytes moved, by tier and codec.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic([[Moved; CodecKind::ALL.len()]; Tier::ALL.len()]);

impl Traffic {
    /// Those of one tier in one form.
    pub fn of(&self, tier: Tier, codec: CodecKind) -> Moved {
        self.0[tier as usize][codec as usize]
    }

    pub(crate) fn of_mut(&mut self, tier: Tier, codec: CodecKind) -> &mut Moved {
        &mut self.0[tier as usize][codec as usize]
    }

    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = (Tier, CodecKind, Moved)> + '_ {
        let all = Tier::ALL.into_iter().flat_map(|tier| CodecKind::ALL.map(|codec| (tier, codec)));
        all.map(|(tier, codec)| (tier, codec, self.of(tier, codec)))
    }

    /// Those of a tier in any form.
    pub fn of_tier(&self, tier: Tier) -> Moved {
        self.0[tier as usize].iter().fold(Moved::default(), |sum, moved| Moved {
            out_bytes: sum.out_bytes + moved.out_bytes,
            in_bytes: sum.in_bytes + moved.in_bytes,
        })
    }
}

/// What went elsewhere than the policy said, because a tier was full.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Fallbacks {
    /// Slices that went to disk for want of host memory.
    pub to_disk: u64,
    /// Slices that stayed on the device.
    pub to_device: u64,
    /// Tensors that are made again.
    pub to_rerun: u64,
    /// Segments that are computed again, since there was no device memory to keep what they save.
    pub to_recompute: u64,
}

impl Fallbacks {
    /// All of them.
    pub fn total(&self) -> u64 {
        self.to_disk + self.to_device + self.to_rerun + self.to_recompute
    }
}

/// What the runtime did since it was made, or since [`crate::Offload::take_report`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OffloadReport {
    /// Bytes saved for backward during forward passes, each slice once, in stored form: kept and sent out together.
    pub saved_bytes: u64,
    /// Bytes that codecs other than raw were given; [`OffloadReport::encoded_bytes`] is what they made of them.
    pub plain_bytes: u64,
    /// Bytes that codecs other than raw made.
    pub encoded_bytes: u64,
    /// Bytes copied out and back.
    pub moved: Traffic,
    /// Bytes not sent out, since backward would have wanted them back at once.
    pub held_bytes: u64,
    /// Bytes handed back while their copy out was in flight, so that no copy back was needed.
    pub forwarded_bytes: u64,
    /// Bytes that were saved again by another op and not counted twice.
    pub shared_bytes: u64,
    /// Bytes not saved, to be made again from others.
    pub rerun_bytes: u64,
    /// Loads that found their slice on the device: kept, handed back or prefetched.
    pub ready_loads: u64,
    /// Loads that had to start the copy back themselves.
    pub late_loads: u64,
    /// Segments that ran a second time.
    pub recomputed_segments: u64,
    /// Times that the budget made the runtime give up a held or prefetched copy.
    pub relieved: u64,
    /// What went elsewhere than the policy said.
    pub fallbacks: Fallbacks,
}

impl AddAssign for OffloadReport {
    fn add_assign(&mut self, other: Self) {
        self.saved_bytes += other.saved_bytes;
        self.plain_bytes += other.plain_bytes;
        self.encoded_bytes += other.encoded_bytes;
        for (tier, codec, moved) in other.moved.iter() {
            let sum = self.moved.of_mut(tier, codec);
            sum.out_bytes += moved.out_bytes;
            sum.in_bytes += moved.in_bytes;
        }
        self.held_bytes += other.held_bytes;
        self.forwarded_bytes += other.forwarded_bytes;
        self.shared_bytes += other.shared_bytes;
        self.rerun_bytes += other.rerun_bytes;
        self.ready_loads += other.ready_loads;
        self.late_loads += other.late_loads;
        self.recomputed_segments += other.recomputed_segments;
        self.relieved += other.relieved;
        self.fallbacks.to_disk += other.fallbacks.to_disk;
        self.fallbacks.to_device += other.fallbacks.to_device;
        self.fallbacks.to_rerun += other.fallbacks.to_rerun;
        self.fallbacks.to_recompute += other.fallbacks.to_recompute;
    }
}

impl OffloadReport {
    /// Bytes copied out, to any tier.
    pub fn out_bytes(&self) -> u64 {
        self.moved.iter().map(|(.., moved)| moved.out_bytes).sum()
    }

    /// Bytes copied back, from any tier.
    pub fn in_bytes(&self) -> u64 {
        self.moved.iter().map(|(.., moved)| moved.in_bytes).sum()
    }

    /// How many times smaller codecs other than raw made what they were given; `None` where they were given nothing.
    pub fn compression(&self) -> Option<f64> {
        (self.encoded_bytes > 0).then(|| self.plain_bytes as f64 / self.encoded_bytes as f64)
    }
}

/// Where time went, in seconds since the runtime was made; zeros where the device times nothing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TransferTimes {
    /// Time that copies, reads and writes took, summed over their streams.
    pub transfer_seconds: f64,
    /// Time that the compute stream stood still for them.
    pub exposed_seconds: f64,
    /// Time that the compute stream stood still, by the stream it waited for; other streams than the runtime's included.
    pub wait_seconds: BTreeMap<String, f64>,
}

impl TransferTimes {
    /// What has been added since `earlier`.
    pub fn since(&self, earlier: &TransferTimes) -> TransferTimes {
        let before = |name: &String| earlier.wait_seconds.get(name).copied().unwrap_or_default();
        TransferTimes {
            transfer_seconds: self.transfer_seconds - earlier.transfer_seconds,
            exposed_seconds: self.exposed_seconds - earlier.exposed_seconds,
            wait_seconds: self
                .wait_seconds
                .iter()
                .map(|(name, s)| (name.clone(), s - before(name)))
                .collect(),
        }
    }

    /// Share of the transfers' time that the compute stream did not stand still for; `None` where nothing was transferred.
    pub fn hidden_share(&self) -> Option<f64> {
        (self.transfer_seconds > 0.0)
            .then(|| (1.0 - self.exposed_seconds / self.transfer_seconds).clamp(0.0, 1.0))
    }
}
