//! Random programs over several streams, under every kind of schedule.
//!
//! A program is a list of steps that its seed alone decides. The host knows what each buffer holds after the steps in order;
//! the simulated device runs them on several streams in an order that its own seed decides, with freed memory poisoned,
//! and must give the same bits. As a negative control the derived waits are left out, and it must notice.

mod common;

use common::programs::{Outcome, Program, STREAMS, program, run};
use ebbtide_kernels::{Category, DType, Device, DropWaits, Error, Op, SimOptions};

/// Schedules of the positive test.
const SCHEDULES: u64 = 20_000;
/// The steps one after another, on one stream of the real backend.
fn in_order(program: &Program) -> Outcome {
    run(Device::cpu().unwrap(), 1, program).unwrap()
}

fn simulated(program: &Program, options: SimOptions) -> Result<Outcome, Error> {
    run(Device::sim(options)?, STREAMS, program)
}

#[test]
fn every_schedule_gives_what_program_order_gives() {
    let programs = SCHEDULES / 40;
    for seed in 0..programs {
        let program = program(seed, seed % 16 == 0);
        let expected = in_order(&program);
        for schedule in 0..SCHEDULES / programs {
            let slow_streams = if schedule % 4 == 3 { vec!["s1".into(), "s2".into()] } else { Vec::new() };
            let options = SimOptions { seed: seed << 8 | schedule, slow_streams, ..SimOptions::default() };
            let found = simulated(&program, options);
            assert_eq!(found.as_ref(), Ok(&expected), "program {seed}, schedule {schedule}: {program:#?}");
        }
    }
}

/// The same programs on the real backend, whose streams are threads.
#[test]
fn threads_give_what_program_order_gives() {
    for seed in 0..200 {
        let program = program(seed, seed % 4 == 0);
        let found = run(Device::cpu().unwrap(), STREAMS, &program).unwrap();
        assert_eq!(found, in_order(&program), "program {seed}");
    }
}

#[test]
fn without_the_waits_the_simulation_fails() {
    let fails = |seed| {
        let options = SimOptions { seed, drop_waits: DropWaits::All, ..SimOptions::default() };
        matches!(simulated(&program(seed, false), options), Err(Error::Violation(_)))
    };
    let failed = (0..100).filter(|&seed| fails(seed)).count();
    assert!(failed > 0, "none of 100 schedules without waits was noticed");
    // It is not luck: the checker needs no unlucky schedule to see a missing wait.
    assert!(failed >= 95, "{failed} of 100");
}

/// A wait that another wait of the same op implies may be left out unharmed; all others are missed.
#[test]
fn a_single_missing_wait_is_noticed() {
    let (mut dropped, mut noticed) = (0, 0);
    for seed in 0..20 {
        let program = program(seed, false);
        for wait in 0..30 {
            let options = SimOptions { seed, drop_waits: DropWaits::Nth(wait), ..SimOptions::default() };
            dropped += 1;
            noticed += usize::from(matches!(simulated(&program, options), Err(Error::Violation(_))));
        }
    }
    assert!(noticed * 2 > dropped, "{noticed} of {dropped} single waits");
}

#[test]
fn one_seed_is_one_schedule() {
    for seed in 0..50 {
        let run = |seed| {
            let options = SimOptions { seed, drop_waits: DropWaits::All, ..SimOptions::default() };
            simulated(&program(7, true), options).map_err(|error| error.to_string())
        };
        assert_eq!(run(seed), run(seed));
    }
}

#[test]
fn unwritten_bytes_are_reported() {
    let device = Device::sim(SimOptions::default()).unwrap();
    let stream = device.stream("s");
    let alloc = |name| device.alloc(8, DType::F32, Category::Activations, name).unwrap();
    let (input, out) = (alloc("input"), alloc("out"));
    stream.submit(Op::Fill { out: input.part(0..7).unwrap(), value: 1.0 }).unwrap();
    stream.submit(Op::Copy { input, out }).unwrap();
    let error = device.synchronize().unwrap_err().to_string();
    assert!(error.contains("copy reads operand `input` at byte 28"), "{error}");
}
