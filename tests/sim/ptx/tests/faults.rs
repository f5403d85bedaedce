//! Kernels with one mistake each: the interpreter says which, at which line, of which thread, and with which addresses; and
//! nothing of the same kernel without it.

mod common;

use common::Number;
use ebbtide_ptx::{Error, Fault, FaultKind, Heap, Launch, Memory, Module};

const SOURCE: &str = include_str!("kernels/faults.cu");
const PTX: &str = include_str!("kernels/faults.ptx");

/// Floats in the kernels' memory, and how many of them hold something: 1, 2, 3…
const FLOATS: usize = 256;
const WRITTEN: usize = 192;

/// A kernel, its launch, and the fault that it has to end in.
struct Mistake {
    kernel: &'static str,
    kind: FaultKind,
    /// Blocks, threads a block and bytes of dynamic shared memory.
    blocks: u32,
    threads: u32,
    shared_bytes: usize,
    /// The kernel's `n`.
    n: i32,
    /// Index of the block to blame and, if one is, of its thread.
    block: u32,
    thread: Option<u32>,
    /// What happened; `{x+4}` stands for the fourth byte of the kernel's memory.
    what: &'static str,
}

/// One block of 32 threads, and a fault of none of them alone.
const PLAIN: Mistake = Mistake {
    kernel: "",
    kind: FaultKind::Race,
    blocks: 1,
    threads: 32,
    shared_bytes: 0,
    n: 0,
    block: 0,
    thread: None,
    what: "",
};

const MISTAKES: &[Mistake] = &[
    Mistake {
        kernel: "beyond_the_end",
        kind: FaultKind::OutOfBounds,
        blocks: 9,
        n: FLOATS as i32,
        block: 8,
        thread: Some(0),
        what: "access of 4 bytes at {x+1024} is out of bounds: it starts 0 bytes past the 1024 bytes at {x}",
        ..PLAIN
    },
    Mistake {
        kernel: "before_the_start",
        kind: FaultKind::OutOfBounds,
        thread: Some(0),
        what: "access of 4 bytes at {x-4} is out of bounds: no allocation lies before it",
        ..PLAIN
    },
    Mistake {
        kernel: "misaligned",
        kind: FaultKind::Misaligned,
        threads: 1,
        thread: Some(0),
        what: "access of 4 bytes at {x+1} (Global memory) is misaligned",
        ..PLAIN
    },
    Mistake {
        kernel: "misaligned_pair",
        kind: FaultKind::Misaligned,
        threads: 64,
        thread: Some(0),
        what: "access of 8 bytes at 0x4 (Shared memory) is misaligned",
        ..PLAIN
    },
    Mistake {
        kernel: "unwritten_global",
        kind: FaultKind::Uninitialised,
        n: WRITTEN as i32 - 4,
        thread: Some(4),
        what: "read of 4 bytes at {x+768}, of which byte 0 was never written",
        ..PLAIN
    },
    Mistake {
        kernel: "beyond_constant",
        kind: FaultKind::OutOfBounds,
        n: 4,
        thread: Some(0),
        what: "access of 4 bytes at 0x10 of 16 bytes of Constant memory",
        ..PLAIN
    },
    Mistake {
        kernel: "never_written",
        kind: FaultKind::Uninitialised,
        shared_bytes: 128,
        thread: Some(16),
        what: "read of shared memory at 64, which was never written",
        ..PLAIN
    },
    Mistake {
        kernel: "beyond_shared",
        kind: FaultKind::OutOfBounds,
        threads: 1,
        shared_bytes: 0,
        thread: Some(0),
        what: "access of 4 bytes at 0 of 0 bytes of shared memory",
        ..PLAIN
    },
    Mistake {
        kernel: "missing_barrier",
        kind: FaultKind::Race,
        threads: 64,
        thread: Some(32),
        what: "race: thread 32 reads shared memory at 124, which thread 31 wrote with no barrier between",
        ..PLAIN
    },
    Mistake {
        kernel: "write_after_read",
        kind: FaultKind::Race,
        threads: 64,
        thread: Some(32),
        what: "race: thread 32 writes shared memory at 0, which thread 31 read with no barrier between",
        ..PLAIN
    },
    Mistake {
        kernel: "write_after_write",
        kind: FaultKind::Race,
        threads: 64,
        thread: Some(32),
        what: "race: thread 32 writes shared memory at 0, which thread 0 wrote with no barrier between",
        ..PLAIN
    },
    Mistake {
        kernel: "missing_warp_sync",
        kind: FaultKind::Race,
        thread: Some(0),
        what: "race: thread 0 reads shared memory at 124, which thread 31 wrote with no barrier between",
        ..PLAIN
    },
    Mistake {
        kernel: "plain_beside_atomic",
        kind: FaultKind::Race,
        threads: 64,
        thread: Some(0),
        what: "race: thread 0 reads shared memory at 0, which thread 31 wrote with no barrier between",
        ..PLAIN
    },
    Mistake {
        kernel: "partial_barrier",
        kind: FaultKind::MissingLane,
        thread: Some(0),
        what: "lanes [16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31] of warp 0 never reach the barrier that its \
               other lanes wait at",
        ..PLAIN
    },
    Mistake {
        kernel: "different_barriers",
        kind: FaultKind::Deadlock,
        threads: 64,
        what: "warp 0 waits at barrier 1 for ever: the other warps wait elsewhere",
        ..PLAIN
    },
    Mistake {
        kernel: "absent_lane",
        kind: FaultKind::MissingLane,
        thread: Some(0),
        what: "lanes [16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31] of warp 0 never reach the warp collective \
               that names them",
        ..PLAIN
    },
    Mistake {
        kernel: "unnamed_source",
        kind: FaultKind::MissingLane,
        thread: Some(0),
        what: "lane 0 takes its value from lane 16, which takes no part",
        ..PLAIN
    },
    Mistake {
        kernel: "too_early",
        kind: FaultKind::InFlight,
        thread: Some(0),
        what: "shared memory at 0 is still being written by a cp.async of thread 0, which has not waited for it",
        ..PLAIN
    },
    Mistake {
        kernel: "wrong_group",
        kind: FaultKind::InFlight,
        thread: Some(0),
        what: "shared memory at 512 is still being written by a cp.async of thread 0, which has not waited for it",
        ..PLAIN
    },
    Mistake {
        kernel: "only_own_copies",
        kind: FaultKind::Race,
        thread: Some(0),
        what: "race: thread 0 reads shared memory at 496, which thread 31 wrote with no barrier between",
        ..PLAIN
    },
    Mistake {
        kernel: "two_blocks",
        kind: FaultKind::Race,
        blocks: 2,
        threads: 1,
        block: 1,
        what: "race: global memory at {x} is also used by another block, and one of them writes it",
        ..PLAIN
    },
    Mistake {
        kernel: "block_reads_block",
        kind: FaultKind::Race,
        blocks: 3,
        block: 1,
        what: "race: global memory at {x} is also used by another block, and one of them writes it",
        ..PLAIN
    },
    Mistake {
        kernel: "trapped",
        kind: FaultKind::Trap,
        thread: Some(5),
        what: "the kernel trapped",
        ..PLAIN
    },
    Mistake {
        kernel: "endless",
        kind: FaultKind::TooLong,
        what: "more than 10000 warp instructions",
        ..PLAIN
    },
];

impl Mistake {
    /// Runs the kernel: its result, and where its memory is.
    fn run(&self, repaired: bool, seed: u64) -> (Result<(), Error>, u64) {
        let module = Module::load(PTX).unwrap();
        let mut heap = Heap::default();
        let x = heap.alloc(FLOATS * 4);
        for index in 0..WRITTEN {
            heap.write(x + 4 * index as u64, &(index as f32 + 1.0).bytes()).unwrap();
        }
        let launch = Launch {
            grid: [self.blocks, 1, 1],
            block: [self.threads, 1, 1],
            // The repaired kernel of a launch with too little shared memory needs all that its threads index.
            shared_bytes: if repaired { self.shared_bytes.max(4) } else { self.shared_bytes },
            arguments: &[&x.bytes(), &self.n.bytes(), &i32::from(repaired).bytes()],
            seed,
            limit: 10_000,
            ..Launch::new(self.kernel)
        };
        (module.launch(&launch, &mut heap).map(|_| ()), x)
    }

    fn fault(&self, x: u64) -> Fault {
        let address = |offset: i64| format!("{:#x}", x.wrapping_add_signed(offset));
        let mut what = self.what.to_string();
        while let Some((before, rest)) = what.split_once('{') {
            let (place, after) = rest.split_once('}').unwrap();
            let offset = place.trim_start_matches('x').parse().unwrap_or_default();
            what = [before, &address(offset), after].concat();
        }
        let mark = format!("// mistake: {}", self.kernel);
        let line = SOURCE.lines().position(|line| line.ends_with(&mark)).unwrap();
        Fault {
            kind: self.kind,
            what,
            kernel: self.kernel.into(),
            file: "faults.cu".into(),
            line: line as u32 + 1,
            block: [self.block, 0, 0],
            thread: self.thread.map(|thread| [thread, 0, 0]),
        }
    }
}

#[test]
fn every_mistake_is_named_with_its_place() {
    for mistake in MISTAKES {
        let (result, x) = mistake.run(false, 0);
        assert_eq!(result, Err(Error::Fault(mistake.fault(x))));
    }
}

/// Which of two accesses comes second, and so the line, depends on the order; that they race does not.
#[test]
fn every_mistake_is_found_in_every_order_of_warps_and_blocks() {
    for mistake in MISTAKES {
        for seed in 1..20 {
            match mistake.run(false, seed).0 {
                Err(Error::Fault(fault)) => {
                    let early = (mistake.kind, fault.kind) == (FaultKind::Race, FaultKind::Uninitialised);
                    assert!(early || fault.kind == mistake.kind, "seed {seed}: {fault}");
                }
                other => panic!("{}, seed {seed}: {other:?}", mistake.kernel),
            }
        }
    }
}

#[test]
fn nothing_is_said_of_a_kernel_without_its_mistake() {
    for mistake in MISTAKES {
        for seed in 0..20 {
            assert_eq!(mistake.run(true, seed).0, Ok(()), "{}, seed {seed}", mistake.kernel);
        }
    }
}

#[test]
fn every_kernel_with_a_mistake_is_tested() {
    let module = Module::load(PTX).unwrap();
    let tested: Vec<_> = MISTAKES.iter().map(|mistake| mistake.kernel).collect();
    assert_eq!(module.kernels().collect::<Vec<_>>(), tested);
}

#[test]
fn a_fault_reads_as_one_line() {
    let mistake = MISTAKES.iter().find(|mistake| mistake.kernel == "missing_barrier").unwrap();
    let (result, x) = mistake.run(false, 0);
    let expected = format!(
        "race: thread 32 reads shared memory at 124, which thread 31 wrote with no barrier between in missing_barrier at \
         faults.cu:{}, block [0, 0, 0], thread [32, 0, 0]",
        mistake.fault(x).line
    );
    assert_eq!(result.unwrap_err().to_string(), expected);
}

/// A launch that does not fit its kernel is refused before anything runs.
#[test]
fn launches_that_do_not_fit_are_refused() {
    let module = Module::load(PTX).unwrap();
    let plain: [&[u8]; 3] = [&[0; 8], &[0; 4], &[0; 4]];
    let base = Launch { arguments: &plain, ..Launch::new("endless") };
    let refused = |launch: &Launch<'_>| module.launch(launch, &mut Heap::default()).unwrap_err().to_string();
    let cases = [
        (
            Launch { block: [33, 32, 1], ..base.clone() },
            "launch of endless: expected 1 to 1024 threads a block, found 1056 ([33, 32, 1])",
        ),
        (
            Launch { block: [0, 1, 1], ..base.clone() },
            "launch of endless: expected 1 to 1024 threads a block, found 0 ([0, 1, 1])",
        ),
        (
            Launch { grid: [1, 65536, 1], ..base.clone() },
            "launch of endless: expected a grid of at least one block and at most 65535 along y and z, found [1, 65536, 1]",
        ),
        (
            Launch { shared_bytes: (227 << 10) + 1, ..base.clone() },
            "launch of endless: expected at most 232448 bytes of shared memory, found 232449",
        ),
        (
            Launch { arguments: &plain[..2], ..base.clone() },
            "launch of endless: expected arguments of [8, 4, 4] bytes, found [8, 4]",
        ),
    ];
    for (launch, expected) in cases {
        assert_eq!(refused(&launch), expected);
    }
    let unknown = refused(&Launch { kernel: "absent", ..base });
    assert!(
        unknown.starts_with("no kernel \"absent\"; the module has beyond_the_end, before_the_start, "),
        "{unknown}"
    );
}
