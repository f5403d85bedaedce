//! Every op's launches, run by an interpreter of the kernels' own code that checks each access, against the `cpu` backend.
//!
//! A kernel may touch what its op declares, its stream's scratch, the failure record and its word, and nothing else: other addresses do not
//! exist here. What it reads and writes of an operand is held against the operand's mode.

use std::ops::Range;

use ebbtide_ptx::{FaultKind, Memory, Module as Code, Problem};
use half::{bf16, f16};
use proptest::prelude::*;

use super::{Call, FAILURE_WORDS, Launch, MODULES, Module, Product, SCRATCH_BYTES, Target, check, plan};
use crate::{CudaOptions, DType, Device, DeviceKind, Op, Slice, op::Mode};

#[path = "../../tests/common/mod.rs"]
mod common;

use common::{
    Bench,
    compare::{bytes_of, close, extra, floats, may_be_narrow, write_inputs},
    cpu,
    ops::{self, New, OPS, SMALL, Sizes, operands},
};

/// Addresses of a device: far from 0, and apart.
const BASE: u64 = 1 << 40;
const SCRATCH: u64 = 1 << 44;
const FAILURE: u64 = 1 << 45;
const STOP: u64 = 1 << 46;

const TARGET: Target = Target { base: BASE, scratch: SCRATCH, failure: FAILURE, stop: STOP, submission: 7 };

/// Pieces of memory; there is nothing between them.
#[derive(Default)]
struct Pieces(Vec<Piece>);

struct Piece {
    start: u64,
    bytes: Vec<u8>,
    written: Vec<bool>,
}

impl Pieces {
    fn add(&mut self, start: u64, bytes: Vec<u8>, written: bool) {
        self.0.push(Piece { start, written: vec![written; bytes.len()], bytes });
    }

    fn piece(&mut self, at: u64, len: usize) -> Result<(&mut Piece, Range<usize>), Problem> {
        let inside = |piece: &&mut Piece| {
            at >= piece.start && at + len as u64 <= piece.start + piece.bytes.len() as u64
        };
        let outside =
            || Problem::new(FaultKind::OutOfBounds, format!("{len} bytes at {at:#x} belong to no operand"));
        let piece = self.0.iter_mut().find(inside).ok_or_else(outside)?;
        let start = (at - piece.start) as usize;
        Ok((piece, start..start + len))
    }

    fn bytes(&mut self, at: u64, len: usize) -> Result<Vec<u8>, Problem> {
        let mut bytes = vec![0; len];
        self.read(at, &mut bytes)?;
        Ok(bytes)
    }
}

impl Memory for Pieces {
    fn read(&mut self, address: u64, into: &mut [u8]) -> Result<(), Problem> {
        let (piece, range) = self.piece(address, into.len())?;
        if piece.written[range.clone()].contains(&false) {
            let what = format!("{} bytes at {address:#x} are read before they are written", into.len());
            return Err(Problem::new(FaultKind::Uninitialised, what));
        }
        into.copy_from_slice(&piece.bytes[range]);
        Ok(())
    }

    fn write(&mut self, address: u64, from: &[u8]) -> Result<(), Problem> {
        let (piece, range) = self.piece(address, from.len())?;
        piece.written[range.clone()].fill(true);
        piece.bytes[range].copy_from_slice(from);
        Ok(())
    }
}

/// The kernels' code, each file read once.
fn code(module: Module) -> &'static Code {
    static LOADED: std::sync::OnceLock<Vec<(Module, Code)>> = std::sync::OnceLock::new();
    let load = |&(module, text): &(Module, &str)| (module, Code::load(text).unwrap());
    let loaded = LOADED.get_or_init(|| MODULES.iter().map(load).collect());
    &loaded.iter().find(|(known, _)| *known == module).unwrap().1
}

/// What a run of the op's plan touched.
#[derive(Default)]
struct Touched {
    reads: Vec<Range<u64>>,
    writes: Vec<Range<u64>>,
}

fn run(op: &Op, memory: &mut Pieces, seed: u64) -> Result<Touched, String> {
    let mut touched = Touched::default();
    let text = |problem: Problem| problem.to_string();
    check(op).unwrap();
    for call in plan(op, &TARGET) {
        match call {
            Call::Launch(launch) => interpret(&launch, memory, &mut touched, seed)?,
            // Either is taken on a card.
            Call::Product(_, own) if seed % 2 == 1 => interpret(&own, memory, &mut touched, seed)?,
            Call::Product(product, _) => multiply(&product, memory, &mut touched).map_err(text)?,
            Call::Copy { from, to, bytes } => {
                let copied = memory.bytes(from, bytes).map_err(text)?;
                memory.write(to, &copied).map_err(text)?;
                touched.reads.push(from..from + bytes as u64);
                touched.writes.push(to..to + bytes as u64);
            }
            Call::Set { at, value, bytes } => {
                memory.write(at, &vec![value; bytes]).map_err(text)?;
                touched.writes.push(at..at + bytes as u64);
            }
        }
    }
    Ok(touched)
}

fn interpret(launch: &Launch, memory: &mut Pieces, touched: &mut Touched, seed: u64) -> Result<(), String> {
    let Launch { module, kernel, grid, block, ref argument } = *launch;
    let launch = ebbtide_ptx::Launch {
        grid: [grid[0], grid[1], 1],
        block: [block, 1, 1],
        arguments: &[argument],
        seed,
        ..ebbtide_ptx::Launch::new(kernel)
    };
    let report = code(module).launch(&launch, memory).map_err(|error| format!("{kernel}: {error}"))?;
    touched.reads.extend(report.reads);
    touched.writes.extend(report.writes);
    Ok(())
}

/// What a library of products does.
fn multiply(product: &Product, memory: &mut Pieces, touched: &mut Touched) -> Result<(), Problem> {
    let Product { m, n, k, input_dtype, out_dtype, .. } = *product;
    let mut read = |at: u64, len: usize, dtype: DType| {
        let bytes = len * dtype.size_bytes();
        touched.reads.push(at..at + bytes as u64);
        Ok(floats(&memory.bytes(at, bytes)?, dtype))
    };
    let (a, b) = (read(product.a, m * k, input_dtype)?, read(product.b, k * n, input_dtype)?);
    let bias = if product.bias == 0 { vec![0.0; n] } else { read(product.bias, n, out_dtype)? };
    let before = if product.accumulate { read(product.out, m * n, out_dtype)? } else { vec![0.0; m * n] };
    let mut out = Vec::new();
    for (row, column) in (0..m).flat_map(|row| (0..n).map(move |column| (row, column))) {
        let of_a = |i| if product.a_transposed { a[i * m + row] } else { a[row * k + i] };
        let of_b = |i| if product.b_transposed { b[column * k + i] } else { b[i * n + column] };
        let sum: f32 = (0..k).map(|i| of_a(i) * of_b(i)).sum();
        let value = sum + bias[column] + before[row * n + column];
        match out_dtype {
            DType::F16 => out.extend(f16::from_f32(value).to_le_bytes()),
            DType::BF16 => out.extend(bf16::from_f32(value).to_le_bytes()),
            _ => out.extend(value.to_le_bytes()),
        }
    }
    memory.write(product.out, &out)?;
    touched.writes.push(product.out..product.out + out.len() as u64);
    Ok(())
}

fn addresses(slice: &Slice) -> Range<u64> {
    let start = BASE + slice.range().start as u64;
    start..start + slice.bytes() as u64
}

/// What an op may touch, its inputs as they are.
fn memory(bench: &Bench, op: &Op) -> Pieces {
    let mut memory = Pieces::default();
    memory.add(SCRATCH, vec![0; SCRATCH_BYTES], false);
    memory.add(FAILURE, vec![0; 4 * FAILURE_WORDS], true);
    memory.add(STOP, vec![0; 4], true);
    for (_, slice, mode) in operands(op) {
        match mode {
            Mode::Write => memory.add(addresses(&slice).start, vec![0xCD; slice.bytes()], false),
            Mode::Read | Mode::Update => memory.add(addresses(&slice).start, bytes_of(bench, &slice), true),
        }
    }
    memory
}

/// Runs the op both ways and holds them against each other. Its inputs have been written.
fn agrees(bench: &Bench, op: &Op, terms: usize, seed: u64) {
    let mut memory = memory(bench, op);
    let touched = run(op, &mut memory, seed).unwrap();
    bench.run(op.clone());
    for (name, slice, mode) in &operands(op) {
        let range = addresses(slice);
        let within = |touched: &Range<u64>| touched.start < range.end && range.start < touched.end;
        let written = touched.writes.iter().any(within);
        assert!(!written || *mode != Mode::Read, "{op:?}: `{name}` is only read, and was written");
        // Scratch is the kernels' own; so is which checksum.
        if *mode == Mode::Read || *name == "workspace" || matches!(op, Op::Checksum { .. }) {
            continue;
        }
        let found = floats(&memory.bytes(range.start, slice.bytes()).unwrap(), slice.dtype());
        let expected = floats(&bytes_of(bench, slice), slice.dtype());
        close(&format!("{op:?} {name}"), &found, &expected, slice.dtype(), terms, extra(op));
    }
    let stop = memory.bytes(STOP, 4).unwrap();
    assert_eq!(stop, [0; 4], "{op:?}: no index is out of range");
}

fn all_agree(ops: &[fn(Sizes, New<'_>) -> Op], sizes: Sizes, mix: u64, offset: usize, seed: u64) {
    for (i, &make) in ops.iter().enumerate() {
        let bench = Bench::new(cpu(1));
        let mut at = 0;
        let op = make(sizes, &mut |len, dtype| {
            let choice = mix >> ((2 * at + i) % 62) & 3;
            let narrow = may_be_narrow(make, &bench, at);
            at += 1;
            let dtype = match choice {
                1 if narrow => DType::F16,
                2 if narrow => DType::BF16,
                _ => dtype,
            };
            bench.alloc(len + offset, dtype).part(offset..offset + len).unwrap()
        });
        if op.check().is_err() {
            continue;
        }
        write_inputs(&bench, &op, seed);
        let terms = sizes.rows().max(4 * sizes.width()).max(sizes.vocabulary);
        agrees(&bench, &op, terms, seed);
    }
}

fn sizes() -> impl Strategy<Value = Sizes> {
    let head = prop_oneof![Just(8usize), Just(16), 1usize..9];
    let vocabulary = prop_oneof![3usize..20, Just(64), 250usize..300];
    (1usize..4, 1usize..40, 1usize..5, head, vocabulary, 0f32..0.6).prop_map(
        |(batch, context, heads, head_size, vocabulary, probability)| Sizes {
            batch,
            context,
            heads,
            head_size,
            vocabulary,
            probability,
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if std::env::var_os("EBBTIDE_SOAK").is_some() { 500 } else { 10 }))]

    #[test]
    fn kernels_give_what_the_cpu_gives(
        sizes in sizes(), mix in any::<u64>(), offset in prop_oneof![Just(0usize), Just(1), Just(8)], seed in any::<u64>(),
    ) {
        all_agree(OPS, sizes, mix, offset, seed);
    }

    /// Contexts about a tile's and several tiles' ends, and every head size.
    #[test]
    fn attention_of_any_size_gives_what_the_cpu_gives(
        batch in 1usize..3,
        context in prop_oneof![1usize..6, 30usize..35, 62usize..67, Just(130usize)],
        heads in 1usize..3,
        head_size in prop_oneof![Just(64usize), Just(128), 1usize..129],
        mix in any::<u64>(),
        seed in any::<u64>(),
    ) {
        let ops: [fn(Sizes, New<'_>) -> Op; 4] = [
            |s, new| ops::attention(s, new, None),
            |s, new| ops::attention(s, new, Some(s.dropout())),
            |s, new| ops::attention_backward(s, new, None),
            |s, new| ops::attention_backward(s, new, Some(s.dropout())),
        ];
        all_agree(&ops, Sizes { batch, context, heads, head_size, ..SMALL }, mix, 0, seed);
    }
}

/// The last byte of an operand is taken away, which the op then does not declare: what touched it is caught.
#[test]
fn a_byte_that_no_operand_has_is_missed() {
    let mut missed = 0;
    for &make in OPS {
        let bench = Bench::new(cpu(1));
        let op = make(SMALL, &mut |len, dtype| bench.alloc(len, dtype));
        write_inputs(&bench, &op, 3);
        for seed in 0..2 {
            let touched = run(&op, &mut memory(&bench, &op), seed).unwrap();
            for (name, slice, _) in operands(&op) {
                let (start, last) = (addresses(&slice).start, addresses(&slice).end - 1);
                if !touched.reads.iter().chain(&touched.writes).any(|range| range.contains(&last)) {
                    continue;
                }
                let mut memory = memory(&bench, &op);
                let piece = memory.0.iter_mut().find(|piece| piece.start == start).unwrap();
                piece.bytes.pop();
                piece.written.pop();
                let error = run(&op, &mut memory, seed).err();
                let error = error.unwrap_or_else(|| panic!("{op:?}: `{name}` is a byte too short"));
                assert!(error.contains("belong to no operand"), "{op:?} {name}: {error}");
                missed += 1;
            }
        }
    }
    assert!(missed > 4 * OPS.len(), "{missed} operands");
}

#[test]
fn a_head_too_large_is_an_error() {
    let bench = Bench::new(cpu(1));
    let sizes = Sizes { head_size: 129, ..SMALL };
    let op = ops::attention(sizes, &mut |len, dtype| bench.alloc(len, dtype), None);
    let error = check(&op).unwrap_err().to_string();
    assert!(error.contains("attention") && error.contains("128") && error.contains("129"), "{error}");
}

/// A device that runs the same code gives the same results, up to what its library of products and its own functions round
/// otherwise. Where `EBBTIDE_DEVICE` names a CUDA device, that is it; else there is nothing to hold the interpreter against.
#[test]
fn a_device_gives_what_the_interpreter_gives() {
    let kind: DeviceKind =
        std::env::var("EBBTIDE_DEVICE").map_or(DeviceKind::Cpu, |kind| kind.parse().unwrap());
    let DeviceKind::Cuda(ordinal) = kind else { return };
    let wide = Sizes { batch: 2, context: 66, heads: 2, head_size: 64, vocabulary: 264, probability: 0.3 };
    for (seed, (sizes, narrow)) in [SMALL, wide]
        .into_iter()
        .flat_map(|sizes| [DType::F32, DType::F16, DType::BF16].map(|narrow| (sizes, narrow)))
        .enumerate()
    {
        let options = CudaOptions { ordinal, budget_bytes: Some(64 << 20) };
        let benches = [Bench::new(cpu(1)), Bench::new(Device::cuda_with(options).unwrap())];
        for &make in OPS {
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
            write_inputs(&benches[0], &ops[0], seed as u64);
            for ((_, from, mode), (_, to, _)) in operands(&ops[0]).into_iter().zip(operands(&ops[1])) {
                if mode != Mode::Write {
                    let up = benches[1].up(&bytes_of(&benches[0], &from));
                    benches[1].run(Op::Copy { input: up, out: to.as_bytes() });
                }
            }
            let mut memory = memory(&benches[0], &ops[0]);
            run(&ops[0], &mut memory, seed as u64).unwrap();
            benches[1].run(ops[1].clone());
            let terms = sizes.rows().max(4 * sizes.width()).max(sizes.vocabulary);
            for ((name, interpreted, mode), (_, slice, _)) in
                operands(&ops[0]).into_iter().zip(operands(&ops[1]))
            {
                if mode == Mode::Read || name == "workspace" {
                    continue;
                }
                let bytes = memory.bytes(addresses(&interpreted).start, interpreted.bytes()).unwrap();
                let of_device = bytes_of(&benches[1], &slice);
                // Sums of integers are the same wherever they are made.
                if matches!(ops[0], Op::Checksum { .. }) {
                    assert_eq!(of_device, bytes, "{:?}", ops[1]);
                    continue;
                }
                let [found, expected] = [of_device, bytes].map(|bytes| floats(&bytes, slice.dtype()));
                close(
                    &format!("{:?} {name}", ops[1]),
                    &found,
                    &expected,
                    slice.dtype(),
                    terms,
                    extra(&ops[1]),
                );
            }
        }
    }
}
