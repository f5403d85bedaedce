//! What the offload runtime did, as metrics files and benchmarks report it.

use std::collections::BTreeMap;

use ebbtide_kernels::{Category, MemoryReport};
use ebbtide_offload::{Offload, OffloadReport, Tier, TransferTimes};
use serde::Serialize;

/// The account of a step, or of a run. Bytes are in stored form; times are 0 where the device times nothing.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Account {
    /// Bytes that forward saved for backward, each slice once.
    pub saved_bytes: u64,
    /// Bytes out and in, by tier and codec, such as `host int8`.
    pub moved: BTreeMap<String, MovedBytes>,
    /// How many times smaller codecs made what they were given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub compression: Option<f64>,
    /// Bytes not sent out, since backward wanted them at once.
    pub held_bytes: u64,
    /// Bytes handed back while on their way out.
    pub forwarded_bytes: u64,
    /// Bytes made again rather than saved.
    pub rerun_bytes: u64,
    /// Segments that ran a second time.
    pub recomputed_segments: u64,
    /// Loads that had to wait for a copy that nothing had started.
    pub late_loads: u64,
    /// What went elsewhere than the policy said, because a tier was full.
    pub fallbacks: FallbackCounts,
    /// Seconds of transfers, summed over their streams.
    pub transfer_seconds: f64,
    /// Share of those that compute did not stand still for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hidden_share: Option<f64>,
    /// Seconds that compute stood still, by the stream that it waited for.
    pub wait_seconds: BTreeMap<String, f64>,
    /// Most device bytes, by what they were for.
    pub peak_device_bytes: BTreeMap<String, usize>,
    /// Host memory that the tier has used at most.
    pub host_bytes: usize,
    /// Disk space that the tier has used at most.
    pub disk_bytes: usize,
    /// Largest absolute error that each lossy codec has made so far, where that is measured.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub worst_errors: BTreeMap<String, f32>,
}

/// See [`ebbtide_offload::Moved`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct MovedBytes {
    /// From the device.
    pub out_bytes: u64,
    /// To the device.
    pub in_bytes: u64,
}

/// See [`ebbtide_offload::Fallbacks`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct FallbackCounts {
    /// Slices that went to disk for want of host memory.
    pub to_disk: u64,
    /// Slices that stayed on the device.
    pub to_device: u64,
    /// Tensors that are made again.
    pub to_rerun: u64,
    /// Segments that are computed again.
    pub to_recompute: u64,
}

impl Account {
    /// The account of what `report` and `times` cover.
    ///
    /// # Errors
    /// The device's, where errors are measured.
    pub fn new(
        offload: &Offload,
        report: &OffloadReport,
        times: &TransferTimes,
        memory: &MemoryReport,
    ) -> ebbtide_kernels::Result<Self> {
        let moved = report.moved.iter().filter(|(.., moved)| moved.out_bytes + moved.in_bytes > 0);
        let moved = moved.map(|(tier, codec, moved)| {
            (format!("{tier} {codec}"), MovedBytes { out_bytes: moved.out_bytes, in_bytes: moved.in_bytes })
        });
        let fallbacks = report.fallbacks;
        let worst_errors = offload.worst_errors()?;
        Ok(Account {
            saved_bytes: report.saved_bytes,
            moved: moved.collect(),
            compression: report.compression(),
            held_bytes: report.held_bytes,
            forwarded_bytes: report.forwarded_bytes,
            rerun_bytes: report.rerun_bytes,
            recomputed_segments: report.recomputed_segments,
            late_loads: report.late_loads,
            fallbacks: FallbackCounts {
                to_disk: fallbacks.to_disk,
                to_device: fallbacks.to_device,
                to_rerun: fallbacks.to_rerun,
                to_recompute: fallbacks.to_recompute,
            },
            transfer_seconds: times.transfer_seconds,
            hidden_share: times.hidden_share(),
            wait_seconds: times.wait_seconds.clone(),
            peak_device_bytes: Category::ALL
                .into_iter()
                .map(|category| (category.to_string(), memory.peak_of(category)))
                .collect(),
            host_bytes: offload.tier_usage(Tier::Host).1,
            disk_bytes: offload.tier_usage(Tier::Disk).1,
            worst_errors: worst_errors.into_iter().map(|(codec, error)| (codec.to_string(), error)).collect(),
        })
    }
}
