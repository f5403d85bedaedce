//! What has gone wrong elsewhere, each as a test: with copies, reads and writes that come as late as can be, so that a
//! missing edge fails every time.

mod common;

use common::{Bench, DISK, HOST, LEN, PLACEMENTS, device, disk, roomy, slow, stored, tight};
use ebbtide_kernels::{Category, DType, Device, DropWaits, Error, Op, SimOptions};
use ebbtide_offload::{Activation, Codec, CodecKind, Offload, OffloadOptions, Placement, Role, Saved, Tier};

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
                "fill: operand `out` would overwrite `h.0/linear.input`, which is saved and may be loaded yet"
            );
            // Reads are as before, and so is what was saved.
            assert_eq!(bench.loaded(&saved), [stored(1); LEN]);
            drop(saved);
            write().unwrap();
        }
    }
}

#[test]
fn saved_twice_a_slice_moves_once() {
    let bench = Bench::new(HOST, tight());
    let slice = bench.filled(1);
    let (first, second) = (bench.save(&slice, "a"), bench.save(&slice, "b"));
    assert_eq!((bench.offload.report().out_bytes(), bench.offload.report().shared_bytes), (1024, 1024));
    // A part of it is another slice.
    let part = bench.save(&slice.part(0..128).unwrap(), "part");
    assert_eq!(bench.offload.report().out_bytes(), 1024 + 512);
    drop(first);
    assert_eq!(bench.loaded(&second), [stored(1); LEN]);
    assert_eq!(bench.loaded(&part), [stored(1); 128]);
}

/// One buffer, one length, two places in it.
#[test]
fn parts_of_one_buffer_are_different_slices() {
    for placement in PLACEMENTS {
        let bench = Bench::new(placement, tight());
        let values: Vec<f32> = (0..LEN).map(|i| stored(i / 128)).collect();
        let slice = bench.compute.upload(&values, Category::Activations, "x").unwrap();
        let halves = [0..128, 128..256].map(|half| bench.save(&slice.part(half).unwrap(), "half"));
        drop(slice);
        assert_eq!(bench.loaded(&halves[1]), [stored(1); 128], "{placement:?}");
        assert_eq!(bench.loaded(&halves[0]), [stored(0); 128], "{placement:?}");
    }
}

/// What a recomputed segment saves is loaded at once.
#[test]
fn what_backward_saves_is_not_sent_out() {
    let bench = Bench::new(HOST, tight());
    bench.offload.begin_backward();
    let saved: Vec<Saved> = (0..4).map(|value| bench.save(&bench.filled(value), "x")).collect();
    for (value, saved) in saved.iter().enumerate().rev() {
        assert_eq!(bench.loaded(saved), [stored(value); LEN]);
    }
    let report = bench.offload.report();
    assert_eq!((report.out_bytes(), report.held_bytes), (0, 4 * 1024));
}

/// A part of a reloaded slice outlives it.
#[test]
fn a_view_of_a_reloaded_tensor_outlives_it() {
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
fn an_offload_followed_at_once_by_a_reload() {
    for placement in PLACEMENTS {
        // Given up at once, so that it comes back from the tier, before its copy out has run.
        let bench = Bench::new(placement, tight());
        let saved = bench.save(&bench.filled(3), "x");
        let back = bench.offload.load(&saved).unwrap();
        assert_eq!(bench.values(&back), [stored(3); LEN], "{placement:?}");
    }
    // Still held, so that nothing is copied back.
    for placement in [HOST, DISK] {
        let bench = Bench::new(placement, roomy());
        let saved = bench.save(&bench.filled(3), "x");
        assert_eq!(bench.loaded(&saved), [stored(3); LEN]);
        assert_eq!((bench.offload.report().forwarded_bytes, bench.offload.report().in_bytes()), (1024, 0));
    }
}

/// A slot that the next step fills while this step's copy back still reads it.
#[test]
fn a_slot_reused_by_the_next_step_while_it_is_still_read() {
    for placement in PLACEMENTS {
        // No room for two.
        let options = OffloadOptions { host_bytes: Some(1024), disk: disk(4096), ..tight() };
        let bench = Bench::new(placement, options);
        for value in 0..8 {
            let saved = bench.save(&bench.filled(value), "x");
            let back = bench.offload.load(&saved).unwrap();
            // The slot is free before any copy has run.
            drop(saved);
            let next = bench.save(&bench.filled(value + 1), "y");
            assert_eq!(bench.values(&back), [stored(value); LEN]);
            assert_eq!(bench.loaded(&next), [stored(value + 1); LEN]);
        }
    }
}

/// The pieces that slices pass on their way to disk are few, and used again while the disk still reads them.
#[test]
fn slices_longer_than_the_pieces_they_go_through() {
    const LONG: usize = (5 << 20) / 4 + 17;
    let bench = Bench::new(DISK, OffloadOptions { disk: disk(32 << 20), ..tight() });
    let saved: Vec<Saved> = (0..3)
        .map(|shift| {
            let values: Vec<f32> = (0..LONG).map(|i| (i * 7 + shift) as f32).collect();
            bench.save(&bench.compute.upload(&values, Category::Activations, "long").unwrap(), "long")
        })
        .collect();
    for (shift, saved) in saved.iter().enumerate().rev() {
        let found = bench.loaded(saved);
        assert!(found.iter().enumerate().all(|(i, &x)| x == (i * 7 + shift) as f32), "slice {shift}");
    }
}

/// The same sizes and shapes, and the same elements in another order.
#[test]
fn a_square_matrix_and_its_transpose_both_saved() {
    const SIDE: usize = 16;
    for placement in PLACEMENTS {
        for options in [tight(), roomy()] {
            let bench = Bench::new(placement, options);
            let matrix: Vec<f32> = (0..SIDE * SIDE).map(|i| (i / SIDE) as f32 * 127.0).collect();
            let transpose: Vec<f32> = (0..SIDE * SIDE).map(|i| (i % SIDE) as f32 * 127.0).collect();
            let up = |values: &Vec<f32>| bench.compute.upload(values, Category::Activations, "m").unwrap();
            let (first, second) = (bench.save(&up(&matrix), "m"), bench.save(&up(&transpose), "m.t"));
            assert_eq!(bench.offload.live(), 2);
            let near = |found: Vec<f32>, expected: &[f32]| {
                found.iter().zip(expected).all(|(a, b)| (a - b).abs() <= 127.0 * 15.0 / 127.0 / 2.0)
            };
            assert!(near(bench.loaded(&second), &transpose), "{placement:?}");
            assert!(near(bench.loaded(&first), &matrix), "{placement:?}");
        }
    }
}

#[test]
fn an_address_reused_by_another_tensor() {
    for placement in PLACEMENTS {
        let bench = Bench::new(placement, tight());
        // Each is dropped before the next is made, and most get the memory of the one before.
        let saved: Vec<Saved> =
            (0..6).map(|value| bench.save(&bench.filled(value), &format!("x{value}"))).collect();
        for (value, saved) in saved.iter().enumerate().rev() {
            assert_eq!(bench.loaded(saved), [stored(value); LEN], "{placement:?}");
        }
    }
}

#[test]
fn a_thousand_abandoned_failed_and_forward_only_steps_leave_nothing() {
    for placement in PLACEMENTS {
        for options in [tight(), roomy()] {
            let bench = Bench::new(placement, options);
            let mut high_water = None;
            for step in 0..1000u32 {
                bench.offload.begin_forward(step);
                let saved: Vec<Saved> = (0..3).map(|i| bench.save(&bench.filled(i), "x")).collect();
                match step % 4 {
                    // Not looked at, used in part, used wholly, failed.
                    0 => {}
                    1 => drop(bench.offload.load(&saved[2]).unwrap()),
                    2 => {
                        bench.offload.begin_backward();
                        saved.iter().rev().for_each(|saved| drop(bench.offload.load(saved).unwrap()));
                    }
                    _ => {
                        let tokens = bench.compute.upload(&[9u32], Category::Staging, "tokens").unwrap();
                        bench.compute.submit(failing(&bench, tokens)).unwrap();
                        assert!(matches!(bench.device.synchronize(), Err(Error::OpFailed { .. })));
                    }
                }
                drop(saved);
                bench.device.synchronize().unwrap();
                assert_eq!(bench.left(), (0, 0, 0), "{placement:?} {step}");
                let most = Tier::ALL.map(|tier| bench.offload.tier_usage(tier).1);
                if step > 100 {
                    assert_eq!(*high_water.get_or_insert(most), most, "{placement:?} {step}: a tier grows");
                }
            }
        }
    }
}

/// An op that finds an index out of range when it runs.
fn failing(bench: &Bench, tokens: ebbtide_kernels::Slice) -> Op {
    let up = |len| bench.compute.upload(&vec![0f32; len], Category::Workspace, "w").unwrap();
    Op::Embedding(ebbtide_kernels::op::Embedding {
        tokens,
        wte: up(2),
        wpe: up(2),
        out: up(2),
        batch: 1,
        context: 1,
        width: 2,
        vocabulary: 1,
        dropout: None,
    })
}

/// A tier that is full hands on to the next; then slices stay; and only where the budget is full too is it an error.
#[test]
fn tiers_that_run_out_hand_on_in_order() {
    let options = OffloadOptions { host_bytes: Some(2 * 1024), disk: disk(3 * 4096), ..tight() };
    let bench = Bench::on(device(Some(4 * 1024)), HOST, options.clone()).unwrap();
    let mut saved = Vec::new();
    for value in 0..7 {
        saved.push(bench.save(&bench.filled(value), "x"));
    }
    let report = bench.offload.report();
    assert_eq!(report.moved.of(Tier::Host, CodecKind::Raw).out_bytes, 2 * 1024);
    assert_eq!(report.moved.of(Tier::Disk, CodecKind::Raw).out_bytes, 3 * 1024);
    assert_eq!((report.fallbacks.to_disk, report.fallbacks.to_device), (3, 2));
    // Two stay; with another two the device is full, and the error says of what.
    let more = [bench.filled(7), bench.filled(8)];
    let Err(Error::OutOfMemory(facts)) = bench.try_filled(9) else { panic!("there is no room") };
    assert_eq!((facts.budget_bytes, facts.in_use_bytes), (4 * 1024, 4 * 1024));
    drop(more);
    // Each is dropped when it has been used, so that there is room for the next.
    while let Some(last) = saved.pop() {
        assert_eq!(bench.loaded(&last), [stored(saved.len()); LEN]);
    }
    assert_eq!(bench.left(), (0, 0, 0));
}

/// The start says what cannot be had, and leaves nothing.
#[test]
fn host_memory_disk_space_and_the_locked_limit_run_out_alone_and_together() {
    let start = |sim: SimOptions, options: OffloadOptions| {
        let device = Device::sim(SimOptions { budget_bytes: Some(1 << 20), ..sim }).unwrap();
        let started = Bench::on(device.clone(), HOST, options);
        let message = started.err().map(|error| error.to_string());
        assert_eq!((device.in_use_bytes(), device.memory().host_bytes), (0, 0), "{message:?}");
        message
    };
    let host = SimOptions { host_bytes: Some(64 << 10), ..slow() };
    let locked = SimOptions { locked_bytes: Some(64 << 10), ..slow() };
    let no_disk = || OffloadOptions { disk: None, ..roomy() };
    let no_space = || OffloadOptions { disk: disk(1 << 60), ..roomy() };
    let no_folder = || {
        let mut options = roomy();
        options.disk.as_mut().unwrap().folder = "/nowhere/at/all".into();
        options
    };
    assert_eq!(start(slow(), no_disk()), None);
    let message = start(host.clone(), no_disk()).unwrap();
    assert!(message.contains("1.00 MiB wanted, the system has not that much"), "{message}");
    let message = start(locked.clone(), no_disk()).unwrap();
    assert!(message.contains("the host tier") && message.contains("ulimit -l"), "{message}");
    let message = start(slow(), no_space()).unwrap();
    assert!(message.contains("no room for a spill file of") && message.contains("/tmp"), "{message}");
    let message = start(slow(), no_folder()).unwrap();
    assert!(message.contains("/nowhere/at/all"), "{message}");
    let both = SimOptions { locked_bytes: locked.locked_bytes, ..host };
    assert!(start(both, no_space()).is_some());
    // The pieces that lead to the disk are host memory too.
    let little = SimOptions { host_bytes: Some((1 << 20) + 4096), ..slow() };
    assert!(start(little, roomy()).unwrap().contains("disk out"));
}

/// One program of everything, without a wait of the host before its end: what the order layer derives is all there is.
fn program(bench: &Bench) -> Vec<(usize, ebbtide_kernels::Slice)> {
    let mut out = Vec::new();
    for step in 0..3 {
        bench.offload.begin_forward(step);
        let saved: Vec<Saved> =
            (0..4).map(|i| bench.save(&bench.filled(10 * step as usize + i), "x")).collect();
        bench.offload.begin_backward();
        for (i, saved) in saved.into_iter().enumerate().rev() {
            out.push((10 * step as usize + i, bench.offload.load(&saved).unwrap()));
        }
        // Given back for the next step to use, all but one.
        out.truncate(step as usize + 1);
    }
    out
}

/// The result of the program under a device with a fault; `Ok(false)` if the values are wrong and nobody said so.
fn run(placement: Placement, sim: SimOptions) -> Result<bool, Error> {
    let options = OffloadOptions { host_bytes: Some(4096), disk: disk(4 * 4096), ..tight() };
    let bench = Bench::on(Device::sim(sim)?, placement, options)?;
    let kept = program(&bench);
    bench.device.synchronize()?;
    Ok(kept.iter().all(|(value, slice)| bench.values(slice) == [stored(*value); LEN]))
}

#[test]
fn each_wait_that_is_left_out_is_reported() {
    for placement in [HOST, DISK, Placement::Offload(Tier::Host, Codec::INT8)] {
        assert_eq!(run(placement, slow()), Ok(true));
        let mut count = 0;
        loop {
            let sim = SimOptions { drop_waits: DropWaits::Nth(count), ..slow() };
            match run(placement, sim) {
                Err(Error::Violation(_)) => count += 1,
                // Past the last wait.
                Ok(true) => break,
                other => panic!("{placement:?}, wait {count}: {other:?}"),
            }
        }
        assert!(count >= 20, "{placement:?}: {count} waits in all");
    }
}

/// A reader that the hazards do not know of: who writes next does not wait for it.
#[test]
fn readers_that_are_forgotten_are_reported() {
    for placement in [HOST, DISK] {
        let mut reported = 0;
        for read in 0..60 {
            match run(placement, SimOptions { forget_read: Some(read), ..slow() }) {
                Err(Error::Violation(_)) => reported += 1,
                // Nobody wrote there again, or was ordered after it by something else.
                Ok(true) => {}
                other => panic!("{placement:?}, read {read}: {other:?}"),
            }
        }
        assert!(reported >= 8, "{placement:?}: {reported}");
    }
}

/// A slot that is never given back shows.
#[test]
fn a_slot_that_is_not_released_is_seen() {
    for placement in [HOST, DISK] {
        let bench = Bench::new(placement, tight());
        let saved = bench.save(&bench.filled(1), "x");
        drop(bench.offload.load(&saved).unwrap());
        // Loaded, so the slot has been given back already, though the handle lives.
        assert_eq!(bench.tier_bytes(), 0);
        std::mem::forget(bench.save(&bench.filled(2), "leaked"));
        assert_ne!(bench.tier_bytes(), 0);
        assert_eq!(bench.offload.live(), 2);
    }
}

/// Each allocation, copy, read and write made to fail in turn: an error, nothing left, and the next step works.
#[test]
fn every_fault_is_an_error_and_the_next_step_works() {
    let step = |bench: &Bench, number: u32| -> Result<(), Error> {
        bench.offload.begin_forward(number);
        let saved: Vec<Saved> = (0..3)
            .map(|i| bench.try_filled(i).and_then(|slice| bench.try_save(&slice, "x")))
            .collect::<Result<_, _>>()?;
        bench.offload.begin_backward();
        for (value, saved) in saved.into_iter().enumerate().rev() {
            let slice = bench.offload.load(&saved)?;
            assert_eq!(bench.compute.download::<f32>(&slice)?, [stored(value); LEN]);
        }
        bench.device.synchronize()
    };
    for placement in PLACEMENTS {
        for of_ops in [true, false] {
            for fault in 0.. {
                let (fail_op, fail_alloc) = if of_ops { (Some(fault), None) } else { (None, Some(fault)) };
                let device = Device::sim(SimOptions { fail_op, fail_alloc, ..slow() }).unwrap();
                let bench = Bench::on(device, placement, tight()).unwrap();
                let result = step(&bench, 1);
                let _ = bench.device.synchronize();
                assert_eq!(bench.left(), (0, 0, 0), "{placement:?} {of_ops} {fault}");
                match result {
                    // Past the last op or allocation nothing fails; before it one that failed may have been tried again.
                    Ok(()) if of_ops || fault > 20 => {
                        assert!(fault >= 6, "{placement:?}: {fault} did not fail");
                        break;
                    }
                    Ok(()) => continue,
                    Err(Error::OpFailed { message, .. }) => assert_eq!(message, "injected fault"),
                    Err(Error::OutOfMemory(_)) => assert!(!of_ops),
                    Err(error) => panic!("{placement:?} {of_ops} {fault}: {error}"),
                }
                step(&bench, 2).unwrap_or_else(|error| panic!("{placement:?} {of_ops} {fault}: {error}"));
            }
        }
    }
}

/// Once a step has shown how much there is, the end of the next is not sent out to come straight back.
#[test]
fn the_last_slices_are_not_sent_out() {
    let options = OffloadOptions { in_flight_bytes: 2048, prefetch_bytes: 2048, window_slices: 0, ..roomy() };
    let bench = Bench::new(HOST, options);
    for step in 0..3 {
        bench.offload.begin_forward(step);
        bench.offload.take_report();
        let saved: Vec<Saved> = (0..6).map(|i| bench.save(&bench.filled(i), "x")).collect();
        bench.offload.begin_backward();
        for (value, saved) in saved.into_iter().enumerate().rev() {
            assert_eq!(bench.loaded(&saved), [stored(value); LEN]);
        }
        let report = bench.offload.report();
        let expected = if step == 0 { (6 * 1024, 0) } else { (4 * 1024, 2 * 1024) };
        assert_eq!((report.out_bytes(), report.held_bytes), expected, "step {step}");
        assert_eq!(report.in_bytes(), 4 * 1024, "what was in flight or held never came back");
    }
}

/// The window is as deep as the budget has room for beside what backward needs.
#[test]
fn a_larger_budget_brings_more_back_ahead_of_need() {
    let in_bytes_at_the_start = |budget: usize| {
        let options =
            OffloadOptions { prefetch_bytes: 1024, in_flight_bytes: 0, window_slices: 0, ..roomy() };
        let bench = Bench::on(device(Some(budget)), HOST, options).unwrap();
        let mut ahead = 0;
        for step in 0..2 {
            bench.offload.begin_forward(step);
            let saved: Vec<Saved> = (0..12).map(|i| bench.save(&bench.filled(i), "x")).collect();
            bench.offload.take_report();
            bench.offload.begin_backward();
            ahead = bench.offload.report().in_bytes();
            for (value, saved) in saved.into_iter().enumerate().rev() {
                let slice = bench.offload.load(&saved).unwrap();
                let gradient = bench.filled(value);
                assert_eq!(bench.values(&slice), bench.values(&gradient));
            }
        }
        ahead
    };
    let found = [4, 8, 16].map(|kib| in_bytes_at_the_start(kib << 10));
    assert!(found[0] >= 1024 && found[0] < found[1] && found[1] < found[2], "{found:?}");
}

#[test]
fn masks_are_stored_as_bits_and_nothing_else_is() {
    for tier in [None, Some(Tier::Host), Some(Tier::Disk)] {
        let device = device(None);
        let compute = device.stream("compute");
        let policy = move |activation: &Activation<'_>| {
            let codec = if activation.role == Role::Mask { Codec::Bits } else { Codec::INT8 };
            tier.map_or(Placement::Keep(codec), |tier| Placement::Offload(tier, codec))
        };
        let offload = Offload::new(&compute, Box::new(policy), tight()).unwrap();
        let mask: Vec<u8> = (0..1003).map(|i| u8::from(i % 3 == 0)).collect();
        let counts: Vec<u8> = (0..1003).map(|i| (i % 251) as u8).collect();
        let indices: Vec<u32> = (0..1003u32).map(|i| i.wrapping_mul(0x0101_0101)).collect();
        let statistics: Vec<f32> = (0..1003).map(|i| 1.0 / i as f32).collect();
        let shape = &[1003];
        let of = |role, dtype| Activation { name: "x", shape, dtype, role, segment: None, rerun: false };
        let up = |values: &[u8]| compute.upload(values, Category::Activations, "x").unwrap();
        let bytes = offload.save(up(&mask), &of(Role::Mask, DType::U8)).unwrap();
        assert_eq!(bytes.bytes(), 126);
        let exact = [
            offload.save(up(&counts), &of(Role::Activation, DType::U8)).unwrap(),
            offload
                .save(
                    compute.upload(&indices, Category::Activations, "i").unwrap(),
                    &of(Role::Activation, DType::U32),
                )
                .unwrap(),
            offload
                .save(
                    compute.upload(&statistics, Category::Activations, "s").unwrap(),
                    &of(Role::Statistic, DType::F32),
                )
                .unwrap(),
        ];
        assert_eq!(compute.download::<u8>(&offload.load(&bytes).unwrap()).unwrap(), mask);
        assert_eq!(compute.download::<u8>(&offload.load(&exact[0]).unwrap()).unwrap(), counts);
        assert_eq!(compute.download::<u32>(&offload.load(&exact[1]).unwrap()).unwrap(), indices);
        let back = compute.download::<f32>(&offload.load(&exact[2]).unwrap()).unwrap();
        assert!(back.iter().zip(&statistics).all(|(a, b)| a.to_bits() == b.to_bits()));
    }
}

#[test]
fn the_worst_error_is_measured_on_demand() {
    let options = OffloadOptions { measure_errors: true, ..tight() };
    let bench = Bench::new(Placement::Offload(Tier::Host, Codec::INT8), options);
    // A scale of 1: 2.25 is a quarter from its code.
    let mut values = vec![0.0f32; 128];
    (values[0], values[1]) = (127.0, 2.25);
    let saved = bench.save(&bench.compute.upload(&values, Category::Activations, "x").unwrap(), "x");
    assert_eq!(bench.offload.worst_errors().unwrap(), [(CodecKind::Int8, 0.25)]);
    assert_eq!(bench.loaded(&saved)[1], 2.0);
    let unmeasured = Bench::new(Placement::Offload(Tier::Host, Codec::INT8), tight());
    unmeasured.save(&unmeasured.filled(1), "x");
    assert_eq!(unmeasured.offload.worst_errors().unwrap(), []);
}

/// What was loaded is there again for who loads it again: nobody may write it as long as the handle lives.
#[test]
fn what_was_loaded_is_as_protected_as_what_was_saved() {
    for placement in PLACEMENTS {
        let bench = Bench::new(placement, tight());
        let saved = bench.save(&bench.filled(1), "x");
        bench.offload.begin_backward();
        let loaded = bench.offload.load(&saved).unwrap();
        let write = || bench.compute.submit(Op::Fill { out: loaded.clone(), value: 2.0 });
        assert!(matches!(write().unwrap_err(), Error::Protected { .. }), "{placement:?}");
        assert_eq!(bench.loaded(&saved), [stored(1); LEN], "{placement:?}");
        drop(saved);
        write().unwrap();
    }
}

/// A slice that is an activation under one name and a statistic under another: the statistic is exact.
#[test]
fn a_statistic_does_not_share_what_was_stored_with_loss() {
    let bench = Bench::new(Placement::Offload(Tier::Host, Codec::INT8), tight());
    let values: Vec<f32> = (0..LEN).map(|i| (i as f32 * 0.37).sin()).collect();
    let slice = bench.compute.upload(&values, Category::Activations, "x").unwrap();
    let lossy = bench.save(&slice, "x");
    let (shape, dtype, role) = (&[LEN][..], DType::F32, Role::Statistic);
    let activation = Activation { name: "mean", shape, dtype, role, segment: None, rerun: false };
    let exact = bench.offload.save(slice, &activation).unwrap();
    assert!(lossy.is_lossy() && !exact.is_lossy());
    assert_ne!(bench.loaded(&lossy), values);
    assert_eq!(bench.loaded(&exact), values);
}

/// A closure may say anything.
#[test]
fn a_codec_that_there_is_not_is_an_error() {
    for group in [0, 1, 100, usize::MAX] {
        let bench = Bench::new(Placement::Keep(Codec::Int8 { group, stochastic: None }), tight());
        let slice = bench.filled(1);
        let shape = &[LEN];
        let activation = Activation {
            name: "x",
            shape,
            dtype: DType::F32,
            role: Role::Activation,
            segment: None,
            rerun: false,
        };
        let error = bench.offload.save(slice, &activation).err().unwrap();
        assert!(matches!(error, Error::BadConstant { .. }), "{error}");
        assert_eq!(bench.offload.live(), 0);
    }
}
