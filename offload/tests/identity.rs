//! What a saved slice is, and that it stays what it is.

use ebbtide_kernels::{Category, DType, Device, Error, Op, SimOptions, Slice, Stream};
use ebbtide_offload::{
    Activation, Codec, Offload, OffloadOptions, Placement, Policy, Role, Saved, SegmentPlan,
};

struct Always(Placement);

impl Policy for Always {
    fn activation(&self, _: &Activation<'_>) -> Placement {
        self.0
    }
    fn segment(&self, _: &str) -> SegmentPlan {
        SegmentPlan::Run
    }
}

const PLACEMENTS: [Placement; 4] = [
    Placement::Keep(Codec::Raw),
    Placement::Offload(Codec::Raw),
    Placement::Keep(Codec::F16),
    Placement::Offload(Codec::INT8),
];

struct Bench {
    device: Device,
    compute: Stream,
    offload: Offload,
}

impl Bench {
    /// A simulated device whose copies come as late as can be.
    fn new(placement: Placement, options: OffloadOptions) -> Self {
        let slow_streams = vec!["offload out".to_string(), "offload in".to_string()];
        let device = Device::sim(SimOptions { slow_streams, ..SimOptions::default() }).unwrap();
        let compute = device.stream("compute");
        let offload = Offload::new(&compute, Box::new(Always(placement)), options).unwrap();
        offload.begin_forward(1);
        Bench { device, compute, offload }
    }

    /// Multiples of 127, which every codec here gives back exactly.
    fn filled(&self, value: usize) -> Slice {
        let value = stored(value);
        let out = self.offload.alloc(256, DType::F32, Category::Activations, "x").unwrap();
        self.compute.submit(Op::Fill { out: out.clone(), value }).unwrap();
        out
    }

    fn save(&self, slice: &Slice, name: &str) -> Saved {
        let shape = &[slice.len()];
        let activation = Activation { name, shape, role: Role::Activation, segment: None, rerun: false };
        self.offload.save(slice.clone(), &activation).unwrap()
    }

    fn values(&self, slice: &Slice) -> Vec<f32> {
        self.compute.download(slice).unwrap()
    }
}

fn stored(value: usize) -> f32 {
    127.0 * value as f32
}

/// Held for nothing, and brought back one at a time.
fn tight() -> OffloadOptions {
    OffloadOptions { in_flight_bytes: 0, prefetch_bytes: 0, min_bytes: 0 }
}

fn roomy() -> OffloadOptions {
    OffloadOptions { min_bytes: 0, ..OffloadOptions::default() }
}

#[test]
fn a_write_between_save_and_use_is_an_error_that_names_both() {
    for placement in PLACEMENTS {
        for options in [tight(), roomy()] {
            let bench = Bench::new(placement, options);
            let slice = bench.filled(1);
            let saved = bench.save(&slice, "h.0/linear.input");
            let write = || bench.compute.submit(Op::Fill { out: slice.part(3..5).unwrap(), value: 2.0 });
            let error = write().unwrap_err();
            assert!(matches!(error, Error::Protected { .. }));
            assert_eq!(
                error.to_string(),
                "fill: operand `out` would overwrite `h.0/linear.input`, which is saved and has not been used yet"
            );
            // Reads are as before, and so is what was saved.
            assert_eq!(bench.values(&bench.offload.load(&saved).unwrap()), [stored(1); 256]);
            drop(saved);
            write().unwrap();
        }
    }
}

#[test]
fn saved_twice_a_slice_moves_once() {
    let bench = Bench::new(Placement::Offload(Codec::Raw), tight());
    let slice = bench.filled(1);
    let (first, second) = (bench.save(&slice, "a"), bench.save(&slice, "b"));
    assert_eq!((bench.offload.report().out_bytes, bench.offload.report().shared_bytes), (1024, 1024));
    // A part of it is another slice.
    let part = bench.save(&slice.part(0..128).unwrap(), "part");
    assert_eq!(bench.offload.report().out_bytes, 1024 + 512);
    drop(first);
    assert_eq!(bench.values(&bench.offload.load(&second).unwrap()), [stored(1); 256]);
    assert_eq!(bench.values(&bench.offload.load(&part).unwrap()), [stored(1); 128]);
}

#[test]
fn a_new_buffer_at_an_old_address_is_another() {
    for placement in PLACEMENTS {
        let bench = Bench::new(placement, tight());
        let mut saved = Vec::new();
        for value in 0..6 {
            // Each is dropped before the next is made, and most get the memory of the one before.
            saved.push(bench.save(&bench.filled(value), &format!("x{value}")));
        }
        for (value, saved) in saved.iter().enumerate().rev() {
            assert_eq!(
                bench.values(&bench.offload.load(saved).unwrap()),
                [stored(value); 256],
                "{placement:?}"
            );
        }
    }
}

#[test]
fn a_slice_is_handed_back_on_its_way_out() {
    let bench = Bench::new(Placement::Offload(Codec::Raw), roomy());
    let saved = bench.save(&bench.filled(3), "x");
    assert_eq!(bench.values(&bench.offload.load(&saved).unwrap()), [stored(3); 256]);
    assert_eq!((bench.offload.report().forwarded_bytes, bench.offload.report().in_bytes), (1024, 0));
}

/// A host slot that the next step fills while this step's copy back still reads it.
#[test]
fn host_slots_are_used_again_only_after_their_last_reader() {
    for placement in [Placement::Offload(Codec::Raw), Placement::Offload(Codec::F16)] {
        let bench = Bench::new(placement, tight());
        for value in 0..8 {
            let saved = bench.save(&bench.filled(value), "x");
            let back = bench.offload.load(&saved).unwrap();
            // The slot is free before any copy has run.
            drop(saved);
            let next = bench.save(&bench.filled(value + 1), "y");
            assert_eq!(bench.values(&back), [stored(value); 256]);
            assert_eq!(bench.values(&bench.offload.load(&next).unwrap()), [stored(value + 1); 256]);
        }
    }
}

/// A part of a reloaded slice outlives it.
#[test]
fn a_view_keeps_what_it_views() {
    for placement in PLACEMENTS {
        let bench = Bench::new(placement, tight());
        let saved = bench.save(&bench.filled(4), "x");
        let view = bench.offload.load(&saved).unwrap().part(10..20).unwrap();
        drop(saved);
        // Whatever is made now must not get the view's memory.
        for value in 0..4 {
            bench.filled(100 + value);
        }
        assert_eq!(bench.values(&view), [stored(4); 10], "{placement:?}");
    }
}

#[test]
fn a_thousand_abandoned_steps_leave_nothing() {
    for placement in PLACEMENTS {
        let bench = Bench::new(placement, tight());
        for step in 0..1000u32 {
            bench.offload.begin_forward(step);
            let saved: Vec<Saved> = (0..3).map(|i| bench.save(&bench.filled(i), "x")).collect();
            match step % 3 {
                // Not looked at, used in part, used wholly.
                0 => {}
                1 => drop(bench.offload.load(&saved[2]).unwrap()),
                _ => {
                    bench.offload.begin_backward();
                    saved.iter().rev().for_each(|saved| drop(bench.offload.load(saved).unwrap()));
                }
            }
            drop(saved);
            bench.device.synchronize().unwrap();
            assert_eq!(
                (bench.offload.live(), bench.device.memory().current_bytes),
                (0, 0),
                "{placement:?} {step}"
            );
        }
        assert!(bench.device.memory().host_bytes <= 3 * 1024, "{placement:?}: host memory grows");
    }
}
