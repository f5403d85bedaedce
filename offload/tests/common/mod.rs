//! What the runtime's tests share: a device, a runtime on it, and slices whose values tell whose they are.
#![allow(dead_code, unreachable_pub)] // Each test uses its part.

use ebbtide_kernels::{
    Category, DType, Device, DeviceKind, DeviceOptions, Op, Result, SimOptions, Slice, Stream,
};
use ebbtide_offload::{
    Activation, Codec, DiskOptions, Offload, OffloadOptions, Placement, Role, Saved, Tier,
};

pub const KEEP: Placement = Placement::Keep(Codec::Raw);
pub const HOST: Placement = Placement::Offload(Tier::Host, Codec::Raw);
pub const DISK: Placement = Placement::Offload(Tier::Disk, Codec::Raw);

/// Every tier, with and without a codec.
pub const PLACEMENTS: [Placement; 6] = [
    KEEP,
    HOST,
    DISK,
    Placement::Keep(Codec::F16),
    Placement::Offload(Tier::Host, Codec::INT8),
    Placement::Offload(Tier::Disk, Codec::BF16),
];

/// Elements of a slice that [`Bench::filled`] makes.
pub const LEN: usize = 256;

pub struct Bench {
    pub device: Device,
    pub compute: Stream,
    pub offload: Offload,
}

/// A simulated device whose copies, reads and writes come as late as can be.
pub fn slow() -> SimOptions {
    let names = ["offload out", "offload in", "disk out", "disk in", "disk out 0", "disk out 1", "disk in 0"];
    SimOptions { slow_streams: names.map(str::to_string).to_vec(), ..SimOptions::default() }
}

/// The device that `EBBTIDE_DEVICE` names, or else the slow one.
pub fn device(budget_bytes: Option<usize>) -> Device {
    const ENOUGH: usize = 64 << 20;
    match std::env::var("EBBTIDE_DEVICE") {
        Ok(name) => {
            let kind: DeviceKind = name.parse().unwrap();
            let budget_bytes = Some(budget_bytes.unwrap_or(ENOUGH));
            Device::open(&DeviceOptions { kind, threads: None, budget_bytes }).unwrap()
        }
        Err(_) => Device::sim(SimOptions { budget_bytes, ..slow() }).unwrap(),
    }
}

impl Bench {
    pub fn new(placement: Placement, options: OffloadOptions) -> Self {
        Self::on(device(None), placement, options).unwrap()
    }

    pub fn on(device: Device, placement: Placement, options: OffloadOptions) -> Result<Self> {
        let compute = device.stream("compute");
        let policy = move |_: &Activation<'_>| placement;
        let offload = Offload::new(&compute, Box::new(policy), options)?;
        offload.begin_forward(1);
        Ok(Bench { device, compute, offload })
    }

    pub fn try_filled(&self, value: usize) -> Result<Slice> {
        let value = stored(value);
        let out = self.offload.alloc(LEN, DType::F32, Category::Activations, "x")?;
        self.compute.submit(Op::Fill { out: out.clone(), value })?;
        Ok(out)
    }

    pub fn filled(&self, value: usize) -> Slice {
        self.try_filled(value).unwrap()
    }

    pub fn try_save(&self, slice: &Slice, name: &str) -> Result<Saved> {
        let (shape, dtype) = (&[slice.len()], slice.dtype());
        let activation =
            Activation { name, shape, dtype, role: Role::Activation, segment: None, rerun: false };
        self.offload.save(slice.clone(), &activation)
    }

    pub fn save(&self, slice: &Slice, name: &str) -> Saved {
        self.try_save(slice, name).unwrap()
    }

    pub fn values(&self, slice: &Slice) -> Vec<f32> {
        self.compute.download(slice).unwrap()
    }

    pub fn loaded(&self, saved: &Saved) -> Vec<f32> {
        self.values(&self.offload.load(saved).unwrap())
    }

    /// Bytes of both tiers in use.
    pub fn tier_bytes(&self) -> usize {
        Tier::ALL.into_iter().map(|tier| self.offload.tier_usage(tier).0).sum()
    }

    /// Slices alive, device bytes and tier bytes in use.
    pub fn left(&self) -> (usize, usize, usize) {
        (self.offload.live(), self.device.in_use_bytes(), self.tier_bytes())
    }
}

/// 127 times a power of two, one of 16, which every codec here gives back exactly.
pub fn stored(value: usize) -> f32 {
    127.0 * 2f32.powi((value % 16) as i32 - 6)
}

pub fn disk(bytes: usize) -> Option<DiskOptions> {
    Some(DiskOptions::new(std::env::temp_dir(), bytes))
}

/// Held for nothing, and brought back one at a time.
pub fn tight() -> OffloadOptions {
    OffloadOptions { in_flight_bytes: 0, prefetch_bytes: 0, window_slices: 0, ..roomy() }
}

pub fn roomy() -> OffloadOptions {
    OffloadOptions {
        min_bytes: 0,
        host_bytes: Some(1 << 20),
        disk: disk(1 << 20),
        ..OffloadOptions::default()
    }
}
