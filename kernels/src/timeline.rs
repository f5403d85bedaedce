//! Virtual time: when each op of a dry device would run on a card of given [`Rates`].
//!
//! The host gives launches one after another; a stream runs its ops in order, after the waits that the order layer derived; an op
//! takes as long as its floating-point operations or its bytes need, whichever is longer, in the first gap of the engine that runs
//! it: the kernels', the link's out or in, or the disk's. So what comes out is a floor: no kernel is faster than its roofline
//! (Williams, Waterman and Patterson, 2009), and none is assumed slower.
//!
//! Costs: a microsecond an op, most of it for its launches, which are those that the `cuda` backend would make; 8 bytes an op.

use std::collections::BTreeMap;

use crate::{
    DType, Op, StreamReport,
    backend::Job,
    cuda::{Target, plan},
    op::{Operand, Place},
    order::Stamp,
};

/// What a card and the machine around it do in a second, for predictions.
#[derive(Clone, Debug, PartialEq)]
pub struct Rates {
    /// The card's name.
    pub name: String,
    /// Bytes of device memory read or written.
    pub memory_bytes: f64,
    /// Floating-point operations of products whose operands are f32.
    pub f32_flops: f64,
    /// Floating-point operations of products with an operand of 16 bits.
    pub half_flops: f64,
    /// Bytes from the device to pinned host memory, while as many come the other way.
    pub out_bytes: f64,
    /// Bytes from pinned host memory to the device, while as many go the other way.
    pub in_bytes: f64,
    /// Bytes written to the disk.
    pub disk_write_bytes: f64,
    /// Bytes read from the disk.
    pub disk_read_bytes: f64,
    /// Seconds, not a rate: what the host takes to queue a launch or a copy.
    pub launch_seconds: f64,
    /// Seconds, not a rate: what a kernel takes at least.
    pub kernel_seconds: f64,
}

/// What the link between a device and pinned host memory was measured to do in a second, with copies of 16 MiB.
#[derive(Clone, Debug, PartialEq)]
pub struct Link {
    /// Bytes from the device, when nothing comes the other way.
    pub out_bytes: f64,
    /// Bytes to the device, when nothing goes the other way.
    pub in_bytes: f64,
    /// Bytes from the device, while as many as can come the other way.
    pub out_together_bytes: f64,
    /// Bytes to the device, while as many as can go the other way.
    pub in_together_bytes: f64,
}

/// Bytes a second of a good NVMe disk, both ways; a guess that a measured one should replace.
const DISK: [f64; 2] = [3e9, 5e9];

impl Rates {
    /// The names that [`Rates::named`] knows.
    pub const NAMES: [&'static str; 4] = ["h200", "a100", "rtx-4090", "rtx-3090"];

    /// Peaks of a card by its data sheet, dense, with f32 accumulation; of the link nine tenths of PCIe's, which is what large pinned copies
    /// reach. Queueing a launch is taken for 3 µs, and the shortest kernel for 2 µs.
    pub fn named(name: &str) -> Option<Self> {
        // TB/s, TFLOP/s in f32, in 16 bits, GB/s a direction.
        let [memory, single, half, link] = match name {
            // NVIDIA H200 SXM; PCIe 5.0 × 16.
            "h200" => [4.8, 67.0, 989.0, 63.0],
            // NVIDIA A100 80 GB SXM; PCIe 4.0 × 16, as those below.
            "a100" => [2.039, 19.5, 312.0, 31.5],
            // NVIDIA's Ada and Ampere GA102 architecture papers.
            "rtx-4090" => [1.008, 82.6, 165.2, 31.5],
            "rtx-3090" => [0.936, 35.6, 71.0, 31.5],
            _ => return None,
        };
        Some(Rates {
            name: name.to_string(),
            memory_bytes: memory * 1e12,
            f32_flops: single * 1e12,
            half_flops: half * 1e12,
            out_bytes: 0.9 * link * 1e9,
            in_bytes: 0.9 * link * 1e9,
            disk_write_bytes: DISK[0],
            disk_read_bytes: DISK[1],
            launch_seconds: 3e-6,
            kernel_seconds: 2e-6,
        })
    }

    /// Those of a card by the name that its driver has for it, if that is one of [`Rates::NAMES`]; laptops' cards and other variants have
    /// other peaks.
    pub fn of_card(name: &str) -> Option<Self> {
        let known = match name {
            "NVIDIA H200" => "h200",
            "NVIDIA A100-SXM4-80GB" => "a100",
            "NVIDIA GeForce RTX 4090" => "rtx-4090",
            "NVIDIA GeForce RTX 3090" => "rtx-3090",
            _ => return None,
        };
        Self::named(known)
    }

    /// With a link that was measured: see [`crate::Device::link`].
    pub fn with_link(self, link: &Link) -> Self {
        Rates { out_bytes: link.out_together_bytes, in_bytes: link.in_together_bytes, ..self }
    }

    /// The engine that runs an op, and the seconds that it takes there.
    fn cost(&self, op: &Op) -> (Engine, f64) {
        let bytes = |per_second: f64| transferred_bytes(op) / per_second;
        match op {
            Op::CopyOut { .. } => (Engine::Out, bytes(self.out_bytes)),
            Op::CopyIn { .. } => (Engine::In, bytes(self.in_bytes)),
            Op::WriteFile { .. } => (Engine::Disk, bytes(self.disk_write_bytes)),
            Op::ReadFile { .. } => (Engine::Disk, bytes(self.disk_read_bytes)),
            op => {
                let of_half = |operand: &Operand<'_>| match &operand.place {
                    Place::Device(slice) => matches!(slice.dtype(), DType::F16 | DType::BF16),
                    _ => false,
                };
                let flops_rate =
                    if op.operands().iter().any(of_half) { self.half_flops } else { self.f32_flops };
                let computed = op.flops() as f64 / flops_rate;
                let moved = op.bytes() as f64 / self.memory_bytes;
                (Engine::Kernels, computed.max(moved).max(self.kernel_seconds))
            }
        }
    }
}

/// Bytes that a copy, read or write moves.
fn transferred_bytes(op: &Op) -> f64 {
    let of_host = op.operands().into_iter().find_map(|operand| match operand.place {
        Place::Host(slice) => Some(slice.bytes()),
        _ => None,
    });
    of_host.unwrap_or(0) as f64
}

/// Calls of the driver that the `cuda` backend makes for an op.
fn launches(op: &Op) -> u64 {
    match op {
        Op::CopyOut { .. } | Op::CopyIn { .. } | Op::WriteFile { .. } | Op::ReadFile { .. } => 1,
        // Down, on the host, and up again.
        Op::Custom { inputs, outputs, .. } => (inputs.len() + 2 * outputs.len()) as u64,
        op => {
            let nowhere = Target { base: 0, scratch: 0, failure: 0, stop: 0, submission: 0 };
            plan(op, &nowhere).len() as u64
        }
    }
}

/// What the ops of one name took on a device with virtual time.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct OpTime {
    /// Kernels, copies and fills that the host queued for them.
    pub launches: u64,
    /// Seconds that they ran, summed.
    pub seconds: f64,
}

/// What ops take turns on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Engine {
    Kernels,
    Out,
    In,
    Disk,
}

/// Gaps of an engine that are remembered; beyond them the oldest is taken for busy.
const MOST_GAPS: usize = 1024;

/// When an engine is idle.
struct Idle {
    /// Start to end of what lies between ops.
    gaps: BTreeMap<Moment, f64>,
    /// The end of the last op.
    end: f64,
}

/// Seconds, in their order; never NaN.
#[derive(Clone, Copy, PartialEq)]
struct Moment(f64);

impl Eq for Moment {}

impl PartialOrd for Moment {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Moment {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.0.total_cmp(&other.0)
    }
}

impl Idle {
    /// Takes the first idle time from `ready` on that is long enough; its start.
    fn take(&mut self, ready: f64, seconds: f64) -> f64 {
        if seconds == 0.0 {
            return ready;
        }
        let before = self.gaps.range(..=Moment(ready)).next_back();
        let later = self.gaps.range(Moment(ready)..);
        let fits = |(start, &end): (&Moment, &f64)| {
            let from = start.0.max(ready);
            (from + seconds <= end).then_some((*start, from, end))
        };
        if let Some((start, from, end)) = before.into_iter().chain(later).find_map(fits) {
            self.gaps.remove(&start);
            self.add_gap(start.0, from);
            self.add_gap(from + seconds, end);
            return from;
        }
        let from = self.end.max(ready);
        self.add_gap(self.end, from);
        self.end = from + seconds;
        from
    }

    fn add_gap(&mut self, start: f64, end: f64) {
        if end > start {
            self.gaps.insert(Moment(start), end);
            if self.gaps.len() > MOST_GAPS {
                self.gaps.pop_first();
            }
        }
    }
}

/// The state of virtual time.
pub(crate) struct Timeline {
    rates: Rates,
    /// When the host gives its next launch.
    host: f64,
    launches: u64,
    engines: [Idle; 4],
    streams: Vec<TimedStream>,
    ops: BTreeMap<String, OpTime>,
}

#[derive(Default)]
struct TimedStream {
    /// When each op ended, by number.
    ends: Vec<f64>,
    busy: f64,
    waited: BTreeMap<usize, f64>,
}

impl Timeline {
    pub(crate) fn new(rates: Rates) -> Self {
        let engines = std::array::from_fn(|_| Idle { gaps: BTreeMap::new(), end: 0.0 });
        Timeline { rates, host: 0.0, launches: 0, engines, streams: Vec::new(), ops: BTreeMap::new() }
    }

    pub(crate) fn add_stream(&mut self) {
        self.streams.push(TimedStream::default());
    }

    pub(crate) fn enqueue(&mut self, Job { stamp, op, waits }: Job) {
        let launches = launches(&op);
        self.launches += launches;
        self.host += launches as f64 * self.rates.launch_seconds;
        let waits: Vec<(usize, f64)> = waits.iter().map(|&wait| (wait.stream, self.end(wait))).collect();
        let stream = &mut self.streams[stamp.stream];
        let mut ready = stream.ends.last().copied().unwrap_or(0.0).max(self.host);
        for (on, end) in waits {
            if end > ready {
                *stream.waited.entry(on).or_default() += end - ready;
                ready = end;
            }
        }
        let (engine, seconds) = self.rates.cost(&op);
        let start = self.engines[engine as usize].take(ready, seconds);
        stream.busy += seconds;
        let time = match self.ops.get_mut(op.name()) {
            Some(time) => time,
            None => self.ops.entry(op.name().to_string()).or_default(),
        };
        time.launches += launches;
        time.seconds += seconds;
        stream.ends.push(start + seconds);
        debug_assert_eq!(stream.ends.len() as u64, stamp.number);
    }

    /// The host waits.
    pub(crate) fn wait(&mut self, stamps: &[Stamp]) {
        self.host = stamps.iter().fold(self.host, |host, &stamp| host.max(self.end(stamp)));
    }

    fn end(&self, stamp: Stamp) -> f64 {
        let at = (stamp.number as usize).checked_sub(1);
        at.and_then(|at| self.streams[stamp.stream].ends.get(at)).copied().unwrap_or(0.0)
    }

    /// Where the host is, in seconds, and the launches that it has made.
    pub(crate) fn now(&self) -> (f64, u64) {
        (self.host, self.launches)
    }

    pub(crate) fn op_times(&self) -> BTreeMap<String, OpTime> {
        self.ops.clone()
    }

    pub(crate) fn fill_times(&self, reports: &mut [StreamReport]) {
        let names: Vec<String> = reports.iter().map(|report| report.name.clone()).collect();
        for (report, stream) in reports.iter_mut().zip(&self.streams) {
            report.busy_seconds = stream.busy;
            report.wait_seconds = stream.waited.values().sum();
            report.wait_seconds_on = stream.waited.iter().map(|(&on, &s)| (names[on].clone(), s)).collect();
        }
    }
}
