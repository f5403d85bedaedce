//! The `cuda` backend on a simulated driver, which runs the kernels' own code and says what no event orders.

mod common;

use std::sync::Mutex;

use common::{
    Bench,
    compare::{bytes_of, close, extra, floats, may_be_narrow, write_inputs},
    cpu,
    failures::{FAILURES, leaves_weights_alone},
    ops::{OPS, SMALL, Sizes, embedding, operands},
    programs::{Outcome, Program, STREAMS, program, run},
};
use ebbtide_kernels::{
    Category, CudaOptions, CudaUnavailable, DType, Device, Error, FILE_ALIGNMENT, Op, Slice, SpillOptions,
    op::{Embedding, Mode},
};
use ebbtide_simcuda::{Action, Card, Rule, Simulator};
// Linked, so that it is built: the backend loads it.
use ebbtide_simcublaslt as _;
use ebbtide_simgpu::Order;

const BUDGET: usize = 1 << 20;

/// The numbers of the driver's errors.
const OUT_OF_MEMORY: u32 = 2;
const ECC_UNCORRECTABLE: u32 = 214;
const LAUNCH_FAILED: u32 = 719;

/// A device of the simulated driver's that no other test has.
struct SimCard {
    simulator: &'static Simulator,
    ordinal: usize,
}

/// Those that a test has had, and how many there were.
static CARDS: Mutex<(Vec<usize>, usize)> = Mutex::new((Vec::new(), 0));

fn fresh(order: Order) -> SimCard {
    let mut cards = CARDS.lock().unwrap();
    let ordinal = cards.0.pop().unwrap_or_else(|| {
        cards.1 += 1;
        cards.1 - 1
    });
    let card = SimCard { simulator: Simulator::load(), ordinal };
    card.simulator.reset(card.ordinal, order);
    card
}

/// What was opened on it has gone: locals are dropped in reverse.
impl Drop for SimCard {
    fn drop(&mut self) {
        CARDS.lock().unwrap().0.push(self.ordinal);
    }
}

impl SimCard {
    fn open(&self) -> Device {
        Device::cuda_with(CudaOptions { ordinal: self.ordinal, budget_bytes: Some(BUDGET) }).unwrap()
    }

    fn rule(&self, call: &str, skip: u64, count: u64, action: Action) {
        self.simulator.rule(self.ordinal, &Rule { call: call.to_string(), skip, count, action });
    }

    fn findings(&self) -> Vec<String> {
        self.simulator.findings(self.ordinal)
    }
}

/// Runs a program in an order of the driver's; what it leaves and what was found.
fn simulated(program: &Program, streams: usize, order: Order) -> (Result<Outcome, Error>, Vec<String>) {
    let card = fresh(order);
    let outcome = run(card.open(), streams, program);
    (outcome, card.findings())
}

/// Seeds of the test of orders.
fn seeds() -> u64 {
    if std::env::var_os("EBBTIDE_SOAK").is_some() { 1000 } else { 40 }
}

#[test]
fn every_order_gives_what_program_order_gives() {
    for seed in 0..seeds() {
        let program = program(seed, seed % 2 == 0);
        let (expected, found) = simulated(&program, 1, Order::Eager);
        let expected = expected.unwrap();
        assert_eq!(found, [""; 0], "program {seed} on one stream");
        for order in [Order::Eager, Order::Lazy, Order::Random(seed), Order::Random(seed << 20 | 1)] {
            let (outcome, found) = simulated(&program, STREAMS, order);
            assert_eq!(found, [""; 0], "program {seed}, {order:?}");
            assert_eq!(outcome.as_ref(), Ok(&expected), "program {seed}, {order:?}");
        }
    }
}

/// One stream follows another, a file's thread, or the host the device; whether each saw what the one before it left.
fn follow(device: &Device) -> Result<bool, Error> {
    let bytes = 64 * FILE_ALIGNMENT;
    let [first, second] = ["first", "second"].map(|name| device.stream(name));
    let (host, result) = (device.host_buffer(bytes, "host")?, device.host_buffer(bytes, "result")?);
    let options = SpillOptions { folder: std::env::temp_dir(), bytes, verify: false };
    let file = device.spill_file(&options)?.part(0..bytes)?;
    let alloc = |name| device.alloc(bytes / 4, DType::F32, Category::Workspace, name);
    let (one, other) = (alloc("one")?, alloc("other")?);
    first.submit(Op::Fill { out: one.clone(), value: 1.0 })?;
    second.submit(Op::Copy { input: one, out: other.clone() })?;
    second.submit(Op::CopyOut { input: other.clone(), out: host.all() })?;
    first.submit(Op::WriteFile { input: host.all(), file: file.clone() })?;
    second.submit(Op::Fill { out: other.clone(), value: 2.0 })?;
    second.submit(Op::CopyOut { input: other.clone(), out: host.all() })?;
    first.submit(Op::ReadFile { file, out: host.all() })?;
    second.submit(Op::CopyIn { input: host.all(), out: other.clone() })?;
    first.submit(Op::CopyOut { input: other, out: result.all() })?;
    let right = result.all().to_vec::<f32>()?.iter().all(|&x| x == 1.0);
    device.synchronize()?;
    Ok(right)
}

/// Each kind of wait, left out: it is noticed in every order, lucky ones too, but where a file's thread is one side, and the system ran
/// it in time or so late that the host knew the other side to be done.
#[test]
fn a_wait_left_out_is_noticed() {
    for wait in ["cuStreamWaitEvent", "cuStreamWaitValue32_v2", "cuEventSynchronize"] {
        let (mut left_out, mut noticed) = (0, 0);
        for seed in 0..50 {
            for order in [Order::Eager, Order::Lazy, Order::Random(seed)] {
                let card = fresh(order);
                card.rule(wait, 0, u64::MAX, Action::Ignore);
                let right = follow(&card.open());
                if card.simulator.calls(card.ordinal, wait) > 0 {
                    left_out += 1;
                    noticed += usize::from(right != Ok(true) || !card.findings().is_empty());
                }
            }
        }
        let least = if wait == "cuStreamWaitEvent" { left_out } else { left_out * 9 / 10 };
        assert!(left_out >= 50 && noticed >= least, "{wait}: {noticed} of {left_out}");
    }
}

/// Of a random program's waits some are implied by what the host has waited for.
#[test]
fn random_programs_need_their_waits() {
    let noticed = |&seed: &u64| {
        let card = fresh(Order::Random(seed));
        card.rule("cuStreamWaitEvent", 0, u64::MAX, Action::Ignore);
        let _ = run(card.open(), STREAMS, &program(seed, false));
        !card.findings().is_empty()
    };
    let noticed = (0..50).filter(noticed).count();
    assert!(noticed >= 45, "{noticed} of 50");
}

/// The device's end does not wait for its queues: memory goes while ops use it.
#[test]
fn memory_that_goes_too_early_is_noticed() {
    let card = fresh(Order::Lazy);
    card.rule("cuStreamSynchronize", 0, u64::MAX, Action::Ignore);
    let bench = Bench::new(card.open());
    bench.run(Op::Fill { out: bench.alloc(100, DType::F32), value: 1.0 });
    drop(bench);
    let findings = card.findings();
    assert!(findings.iter().any(|finding| finding.contains("FreedInUse")), "{findings:?}");
}

/// A copy whose host memory nobody pinned.
#[test]
fn a_pageable_copy_is_noticed() {
    for ignore in [false, true] {
        let card = fresh(Order::Eager);
        if ignore {
            card.rule("cuMemHostRegister_v2", 0, u64::MAX, Action::Ignore);
            card.rule("cuMemHostUnregister", 0, u64::MAX, Action::Ignore);
        }
        let bench = Bench::new(card.open());
        let host = bench.device.host_unlimited("host").unwrap();
        let input = bench.up(&[1.5f32; 100]);
        bench.run(Op::CopyOut { input, out: host.part(0..400).unwrap() });
        let copied = host.part(0..400).unwrap().to_vec::<f32>();
        drop((bench, host));
        let findings = card.findings();
        match ignore {
            false => assert!(copied == Ok(vec![1.5; 100]) && findings.is_empty(), "{findings:?}"),
            true => assert!(findings.iter().any(|finding| finding.contains("Unpinned")), "{findings:?}"),
        }
    }
}

#[test]
fn what_follows_is_found_in_order() {
    for seed in 0..50 {
        for order in [Order::Eager, Order::Lazy, Order::Random(seed)] {
            let card = fresh(order);
            assert!(follow(&card.open()).unwrap(), "{order:?}");
            assert_eq!(card.findings(), [""; 0], "{order:?}");
        }
    }
}

#[test]
fn one_seed_is_one_trace() {
    for seed in 0..20 {
        let trace = || {
            let card = fresh(Order::Random(seed));
            let outcome = run(card.open(), STREAMS, &program(seed, false)).unwrap();
            (outcome, card.simulator.trace(card.ordinal))
        };
        assert_eq!(trace(), trace(), "seed {seed}");
    }
}

/// Both ways of a product, and types of 16 bits where an op takes them.
#[test]
fn each_op_gives_what_the_cpu_gives() {
    let sizes =
        [SMALL, Sizes { batch: 2, context: 17, heads: 2, head_size: 8, vocabulary: 64, probability: 0.3 }];
    for (number, sizes) in sizes.into_iter().enumerate() {
        for narrow in [DType::F32, DType::F16, DType::BF16] {
            for &make in OPS {
                let card = fresh(Order::Random(number as u64));
                let benches = [Bench::new(cpu(1)), Bench::new(card.open())];
                let ops = benches.each_ref().map(|bench| {
                    let mut at = 0;
                    make(sizes, &mut |len, dtype| {
                        let dtype = if may_be_narrow(make, bench, at) { narrow } else { dtype };
                        at += 1;
                        bench.alloc(len, dtype)
                    })
                });
                if ops[0].check().is_err() {
                    continue;
                }
                // The same inputs, to the bit: kernels that make them differ.
                write_inputs(&benches[0], &ops[0], 5);
                for ((_, from, mode), (_, to, _)) in operands(&ops[0]).into_iter().zip(operands(&ops[1])) {
                    if mode != Mode::Write {
                        let up = benches[1].up(&bytes_of(&benches[0], &from));
                        benches[1].run(Op::Copy { input: up, out: to.as_bytes() });
                    }
                }
                benches.iter().zip(&ops).for_each(|(bench, op)| bench.run(op.clone()));
                let terms = sizes.rows().max(4 * sizes.width()).max(sizes.vocabulary);
                for ((name, of_cpu, mode), (_, slice, _)) in
                    operands(&ops[0]).into_iter().zip(operands(&ops[1]))
                {
                    if mode == Mode::Read || name == "workspace" || matches!(ops[0], Op::Checksum { .. }) {
                        continue;
                    }
                    let read = |bench, slice: &Slice| floats(&bytes_of(bench, slice), slice.dtype());
                    let (expected, found) = (read(&benches[0], &of_cpu), read(&benches[1], &slice));
                    let what = format!("{:?} {name}", ops[1]);
                    close(&what, &found, &expected, slice.dtype(), terms, extra(&ops[1]));
                }
                drop((ops, benches));
                assert_eq!(card.findings(), [""; 0]);
            }
        }
    }
}

/// The machine is everybody's: tests that change it take turns, and leave it as it was.
static MACHINE: Mutex<()> = Mutex::new(());

#[test]
fn what_cannot_be_used_is_said() {
    let _turn = MACHINE.lock();
    let simulator = Simulator::load();
    let last = Card::default().devices - 1;
    let open = |ordinal, budget_bytes| match Device::cuda_with(CudaOptions { ordinal, budget_bytes }) {
        Err(Error::Cuda { ordinal: said, reason }) => {
            assert_eq!(said, ordinal);
            reason
        }
        other => panic!("{:?}", other.map(|device| device.name().to_string())),
    };
    assert_eq!(open(last + 1, None), CudaUnavailable::NoDevice { count: last + 1 });
    let wanted = 200 << 30;
    match open(last, Some(wanted)) {
        CudaUnavailable::Memory { wanted: said, free, fitting, .. } => {
            assert!(said == wanted && fitting < free && free < wanted, "{said} {fitting} {free}");
        }
        other => panic!("{other:?}"),
    }
    simulator.rule(
        last,
        &Rule { call: "cuMemAlloc_v2".into(), skip: 0, count: u64::MAX, action: Action::Fail(OUT_OF_MEMORY) },
    );
    assert!(matches!(open(last, Some(BUDGET)), CudaUnavailable::Memory { wanted: BUDGET, .. }));
    simulator.reset(last, Order::Eager);
}

#[test]
fn a_kernel_that_fails_is_an_error_and_nothing_hangs() {
    for call in ["cuLaunchKernel", "cuMemcpyDtoHAsync_v2", "cuEventRecord", "cuStreamWaitEvent"] {
        for seed in 0..10 {
            let card = fresh(Order::Random(seed));
            card.rule(call, seed, 1, Action::Fail(LAUNCH_FAILED));
            let outcome = run(card.open(), STREAMS, &program(seed, false));
            let reached = card.simulator.calls(card.ordinal, call) > seed;
            match outcome {
                Err(Error::Driver { call: said, error, .. }) => {
                    assert_eq!(said, call);
                    assert!(error.contains("CUDA_ERROR_LAUNCH_FAILED (719)"), "{error}");
                }
                other => assert!(other.is_ok() && !reached, "{call}, seed {seed}: {other:?}"),
            }
            assert_eq!(card.findings(), [""; 0], "{call}, seed {seed}");
        }
    }
}

/// The device is gone: every call says so from then on, and letting go of what it held does not hang.
#[test]
fn a_lost_device_is_an_error() {
    for seed in 0..10 {
        let card = fresh(Order::Random(seed));
        card.rule("cuLaunchKernel", 3 + seed, 1, Action::Break(ECC_UNCORRECTABLE));
        let error = run(card.open(), STREAMS, &program(seed, seed % 2 == 0)).unwrap_err().to_string();
        assert!(error.contains("CUDA_ERROR_ECC_UNCORRECTABLE (214)"), "{error}");
    }
}

/// Two cards, and a card and the CPU.
#[test]
fn operands_of_another_device_are_refused() {
    let cards = [fresh(Order::Lazy), fresh(Order::Lazy)];
    let benches = [Bench::new(cards[0].open()), Bench::new(cards[1].open()), Bench::new(cpu(1))];
    for (own, other) in [(0, 1), (0, 2), (2, 1)] {
        let op = Op::Add { input: benches[other].up(&[1.0f32]), out: benches[own].up(&[2.0f32]) };
        let expected = Error::OtherDevice { op: "add".to_string(), operand: "input" };
        assert_eq!(benches[own].stream.submit(op), Err(expected));
        let host = benches[other].device.host_buffer(4, "host").unwrap();
        let op = Op::CopyIn { input: host.all(), out: benches[own].up(&[2.0f32]) };
        assert!(matches!(benches[own].stream.submit(op), Err(Error::OtherDevice { .. })));
    }
    drop(benches);
    assert_eq!(cards.map(|card| card.findings()), [const { Vec::<String>::new() }; 2]);
}

#[test]
fn an_index_out_of_range_is_an_error_that_names_it() {
    let card = fresh(Order::Lazy);
    let bench = Bench::new(card.open());
    let op = embedding(SMALL, &mut |len, dtype| bench.alloc(len, dtype), None);
    write_inputs(&bench, &op, 1);
    let Op::Embedding(Embedding { tokens, .. }) = &op else { unreachable!() };
    let mut wrong = vec![0u32; tokens.len()];
    wrong[4] = 7;
    bench.run(Op::Copy { input: bench.up(&wrong), out: tokens.clone() });
    bench.run(op);
    let error = bench.device.synchronize().unwrap_err().to_string();
    assert!(error.contains("token 7 at index 4 is outside of the vocabulary of 7"), "{error}");
    // Taken once, it is over.
    let out = bench.device.alloc(3, DType::F32, Category::Workspace, "out").unwrap();
    bench.run(Op::Fill { out: out.clone(), value: 2.0 });
    assert_eq!(bench.down::<f32>(&out), [2.0; 3]);
}

/// The host hears of it later; the update was queued long before.
#[test]
fn an_update_behind_a_failure_changes_nothing() {
    for (fail, expected) in FAILURES {
        for order in [Order::Eager, Order::Lazy, Order::Random(1), Order::Random(2)] {
            let card = fresh(order);
            leaves_weights_alone(card.open(), fail, expected);
            assert_eq!(card.findings(), [""; 0], "{order:?}");
        }
    }
}

/// By the driver's virtual clock: 1 µs a kernel or copy, and 1 ns a byte that is copied.
#[test]
fn streams_are_timed_by_the_devices_clock() {
    for order in [Order::Eager, Order::Lazy, Order::Random(3)] {
        let card = fresh(order);
        let device = card.open();
        let [compute, copies, files] = ["compute", "copies", "files"].map(|name| device.stream(name));
        let alloc = || device.alloc(1000, DType::F32, Category::Workspace, "x").unwrap();
        let (x, y, host) = (alloc(), alloc(), device.host_buffer(FILE_ALIGNMENT, "host").unwrap());
        let fill = |out: &Slice| compute.submit(Op::Fill { out: out.clone(), value: 1.0 }).unwrap();
        for _ in 0..2 {
            [&x, &x, &y].into_iter().for_each(fill);
            copies.submit(Op::CopyOut { input: x.clone(), out: host.part(0..4000).unwrap() }).unwrap();
            // Two that the copy leaves to be done meanwhile.
            [&y, &y, &x].into_iter().for_each(fill);
        }
        device.synchronize().unwrap();
        let report = |stream: &ebbtide_kernels::Stream| stream.report();
        let close =
            |found: f64, nanos: f64| assert!((found - nanos * 1e-9).abs() < 1e-12, "{order:?} {found}");
        let (on_device, copied) = (report(&compute), report(&copies));
        // A copy goes from 3 to 8 µs, and the fill after it comes at 8; the next goes from 12 to 17.
        close(on_device.busy_seconds + on_device.wait_seconds, 18e3);
        close(copied.busy_seconds + copied.wait_seconds, 17e3);
        // Where the host has seen that there is nothing to wait for, it waits for nothing.
        if order == Order::Lazy {
            close(on_device.wait_seconds_on["copies"], 6e3);
            close(copied.wait_seconds_on["compute"], 3e3 + 4e3);
        }
        let busy = on_device.busy_seconds;
        // A queue without work is neither busy nor waiting.
        fill(&x);
        device.synchronize().unwrap();
        close(report(&compute).busy_seconds - busy, 1e3);
        // A file's thread is timed by the host, as the wait for it is by the device, whose clock is not the host's.
        let options = SpillOptions { folder: std::env::temp_dir(), bytes: FILE_ALIGNMENT, verify: false };
        let file = device.spill_file(&options).unwrap().part(0..FILE_ALIGNMENT).unwrap();
        copies.submit(Op::CopyOut { input: x.clone(), out: host.part(0..4000).unwrap() }).unwrap();
        files.submit(Op::WriteFile { input: host.all(), file }).unwrap();
        copies.submit(Op::CopyOut { input: x.clone(), out: host.part(0..4000).unwrap() }).unwrap();
        device.synchronize().unwrap();
        assert!(report(&files).busy_seconds > 0.0);
        if order == Order::Lazy {
            let waits = |stream, on: &str| report(stream).wait_seconds_on.contains_key(on);
            assert!(waits(&files, "copies") && waits(&copies, "files"));
        }
        drop((x, y, host, compute, copies, files, device));
        assert_eq!(card.findings(), [""; 0], "{order:?}");
    }
}

/// The virtual clock takes 1 µs a copy and 1 ns a byte, each way for itself.
#[test]
fn the_link_is_measured_once() {
    let card = fresh(Order::Lazy);
    let device = card.open();
    let link = device.link().unwrap().unwrap();
    for rate in [link.out_bytes, link.in_bytes, link.out_together_bytes, link.in_together_bytes] {
        assert!((0.9999e9..1e9).contains(&rate), "{link:?}");
    }
    let copies = card.simulator.calls(card.ordinal, "cuMemcpyDtoHAsync_v2");
    assert_eq!((device.link().unwrap().unwrap(), copies), (link, 24));
    assert_eq!(card.simulator.calls(card.ordinal, "cuMemcpyDtoHAsync_v2"), copies);
    drop(device);
    assert_eq!(card.findings(), [""; 0]);
    assert_eq!(cpu(1).link(), Ok(None));
}

#[test]
fn a_link_that_cannot_be_measured_is_an_error() {
    let card = fresh(Order::Lazy);
    let device = card.open();
    // Half of what it needs is taken by then.
    card.rule(
        "cuMemHostAlloc",
        card.simulator.calls(card.ordinal, "cuMemHostAlloc") + 1,
        1,
        Action::Fail(OUT_OF_MEMORY),
    );
    let error = device.link().unwrap_err().to_string();
    assert!(error.contains("measuring the link") && error.contains("cuMemHostAlloc"), "{error}");
    assert!(device.link().is_ok());
    drop(device);
    assert_eq!(card.findings(), [""; 0]);
}
