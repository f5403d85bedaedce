//! What every op promises whatever it computes, held for one list of all ops: what is refused at submission, and that
//! what it writes is written whole, with the same bits on any number of threads and on the simulated device.

mod common;

use common::{
    Bench, cpu,
    ops::{New, OPS, SMALL, Sizes, adamw, operands, write_inputs},
};
use ebbtide_kernels::{
    Category, CudaUnavailable, DType, Device, DeviceKind, Error, Op, SimOptions, Slice,
    op::{AdamW, CrossEntropy, EmbeddingBackward, Mode},
};
use proptest::prelude::*;

/// The bytes of everything that the op writes.
fn results(device: Device, make: fn(Sizes, New<'_>) -> Op, sizes: Sizes, seed: u64) -> Vec<Vec<u8>> {
    let bench = Bench::new(device);
    let op = make(sizes, &mut |len, dtype| bench.alloc(len, dtype));
    write_inputs(&bench, &op, seed);
    bench.run(op.clone());
    let bytes = |slice: Slice| -> Vec<u8> {
        let host = bench.device.host_buffer(slice.bytes(), "bytes").unwrap();
        bench.run(Op::CopyOut { input: slice, out: host.all() });
        host.all().to_vec().unwrap()
    };
    let written = operands(&op).into_iter().filter(|(_, _, mode)| *mode != Mode::Read);
    written.map(|(_, slice, _)| bytes(slice)).collect()
}

#[test]
fn a_cuda_device_that_is_not_there_is_a_typed_error() {
    let Err(Error::Cuda { ordinal, reason }) = Device::cuda(9999) else { panic!("there is no such device") };
    assert_eq!(ordinal, 9999);
    let message = reason.to_string();
    match reason {
        CudaUnavailable::NoDriver => assert!(message.contains("looked for libcuda.so"), "{message}"),
        CudaUnavailable::NoDevice { count } => assert!(message.contains(&count.to_string()), "{message}"),
        other => panic!("{other}"),
    }
    // Whatever there is, something runs.
    let device = Device::best().unwrap();
    assert!(["cpu", "cuda"].contains(&device.backend_name()));
}

#[test]
fn devices_have_names() {
    for (text, kind) in [
        ("cpu", DeviceKind::Cpu),
        ("cuda", DeviceKind::Cuda(0)),
        ("cuda:3", DeviceKind::Cuda(3)),
        ("best", DeviceKind::Best),
    ] {
        assert_eq!(text.parse(), Ok(kind));
        assert_eq!(kind.to_string(), text);
    }
    for text in ["", "gpu", "cuda:", "cuda:-1", "cuda:x", "CPU"] {
        let error = text.parse::<DeviceKind>().unwrap_err();
        assert!(error.contains("expected `cpu`, `cuda`"), "{error}");
    }
}

#[test]
fn an_operand_of_another_length_or_dtype_is_refused() {
    let bench = Bench::new(cpu(1));
    for make in OPS {
        let op = make(SMALL, &mut |len, dtype| bench.alloc(len, dtype));
        let count = operands(&op).len();
        for wrong in 0..count {
            for change in [(1, false), (-1, false), (0, true)] {
                let mut at = 0;
                let op = make(SMALL, &mut |len, dtype| {
                    let (more, other) = if at == wrong { change } else { (0, false) };
                    at += 1;
                    bench.alloc(len.strict_add_signed(more), if other { DType::U8 } else { dtype })
                });
                // Alone on its side of an op that takes any length or dtype, an operand cannot be wrong.
                let free = match &op {
                    Op::Fill { .. } => true,
                    Op::Checksum { .. } => wrong == 0,
                    Op::Dropout { .. } => change.0 != 0,
                    Op::Sum { .. }
                    | Op::SumSquares { .. }
                    | Op::ClipCoefficient { .. }
                    | Op::Unscale { .. } => wrong == 0 && change.0 != 0,
                    _ => false,
                };
                let found = bench.stream.submit(op.clone());
                let refused = matches!(
                    &found,
                    Err(Error::BadOperand { op: name, .. } | Error::BadConstant { op: name, .. })
                        if name == op.name()
                );
                assert!(refused != free, "{op:?}, operand {wrong}, {change:?}: {found:?}");
            }
        }
    }
}

#[test]
fn operands_that_share_bytes_are_refused_unless_both_are_read() {
    let bench = Bench::new(cpu(1));
    for make in OPS {
        let count = operands(&make(SMALL, &mut |len, dtype| bench.alloc(len, dtype))).len();
        for second in 0..count {
            for first in 0..second {
                let mut made: Vec<Slice> = Vec::new();
                let op = make(SMALL, &mut |len, dtype| {
                    let shared =
                        made.len() == second && (made[first].len(), made[first].dtype()) == (len, dtype);
                    let slice = if shared { made[first].clone() } else { bench.alloc(len, dtype) };
                    made.push(slice.clone());
                    slice
                });
                let shared = made[first].buffer_id() == made[second].buffer_id();
                let writes = operands(&op).into_iter().any(|(_, slice, mode)| {
                    slice.buffer_id() == made[second].buffer_id() && mode != Mode::Read
                });
                let found = op.check();
                let refused = matches!(&found, Err(Error::Overlap { op: name, .. }) if name == op.name());
                assert_eq!(refused, shared && writes, "{op:?}: {found:?}");
            }
        }
    }
}

#[test]
fn constants_out_of_range_are_refused() {
    let bench = Bench::new(cpu(1));
    let mut with_dropout = 0;
    for probability in [1.0, 1.5, -0.1, f32::NAN, f32::INFINITY] {
        with_dropout = 0;
        for make in OPS {
            let op = make(Sizes { probability, ..SMALL }, &mut |len, dtype| bench.alloc(len, dtype));
            match op.check() {
                Ok(()) => {}
                Err(Error::BadConstant { .. }) => with_dropout += 1,
                other => panic!("{op:?}: {other:?}"),
            }
        }
    }
    // Dropout, layer norm, two of its backward, two of attention, two of embedding.
    assert_eq!(with_dropout, 8);
    let Op::AdamW(op) = adamw(SMALL, &mut |len, dtype| bench.alloc(len, dtype), false) else {
        unreachable!()
    };
    let found = Op::AdamW(AdamW { step: 0, ..op }).check();
    assert!(matches!(found, Err(Error::BadConstant { .. })), "{found:?}");
}

#[test]
fn operands_of_another_device_are_refused() {
    let (bench, other) = (Bench::new(cpu(1)), Bench::new(cpu(1)));
    let (_, input) = (other.up(&[0.0f32]), other.up(&[1.0f32]));
    let op = Op::Add { input, out: bench.up(&[1.0f32]) };
    let expected = Error::OtherDevice { op: "add".to_string(), operand: "input" };
    assert_eq!(bench.stream.submit(op), Err(expected));
}

/// Unwritten memory is NaN on the simulated device and zero on a new CPU device, so equal bits also mean no hole.
fn same_everywhere(sizes: Sizes, seed: u64) {
    for (i, &make) in OPS.iter().enumerate() {
        let expected = results(cpu(1), make, sizes, seed);
        for threads in [2, 5] {
            assert!(
                results(cpu(threads), make, sizes, seed) == expected,
                "op {i}, {threads} threads, {sizes:?}"
            );
        }
        let sim = Device::sim(SimOptions { seed, ..SimOptions::default() }).unwrap();
        assert!(results(sim, make, sizes, seed) == expected, "op {i}, simulated, {sizes:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(6))]

    #[test]
    fn every_op_gives_the_same_bits_everywhere(
        batch in 1usize..4, context in 1usize..90, heads in 1usize..4, head_size in 1usize..40,
        vocabulary in 3usize..300, seed in 0u64..1 << 40,
    ) {
        same_everywhere(Sizes { batch, context, heads, head_size, vocabulary, probability: 0.3 }, seed);
    }
}

/// Products of more than one piece, several tiles of keys, pieces of elements and blocks of rows.
#[test]
fn large_ops_give_the_same_bits_everywhere() {
    same_everywhere(
        Sizes { batch: 2, context: 530, heads: 3, head_size: 47, vocabulary: 263, probability: 0.1 },
        11,
    );
}

/// An index that is out of range is found on the simulated device too, in the backward op too, and spoils nothing.
#[test]
fn indices_out_of_range_name_value_and_index() {
    for device in [cpu(3), Device::sim(SimOptions::default()).unwrap()] {
        let bench = Bench::new(device);
        let tables = [bench.up(&[0.5f32; 8]), bench.up(&[0.5f32; 6])];
        bench.run(Op::EmbeddingBackward(EmbeddingBackward {
            tokens: bench.up(&[3u32, 1, u32::MAX]),
            dout: bench.up(&[1.0f32; 6]),
            dwte: tables[0].clone(),
            dwpe: tables[1].clone(),
            batch: 1,
            context: 3,
            width: 2,
            vocabulary: 4,
            dropout: None,
        }));
        let message = bench.device.synchronize().unwrap_err().to_string();
        assert!(message.starts_with("embedding_backward failed: token 4294967295 at index 2"), "{message}");
        bench.run(Op::CrossEntropy(CrossEntropy {
            logits: bench.up(&[1.0f32; 4]),
            targets: bench.up(&[i32::MIN, i32::MAX]),
            losses: bench.alloc(2, DType::F32),
            rows: 2,
            vocabulary: 2,
            gradient_scale: Some(1.0),
            loss_scale: None,
        }));
        let message = bench.device.synchronize().unwrap_err().to_string();
        assert!(message.starts_with("cross_entropy failed: target 2147483647 at index 1"), "{message}");
        let after = bench.stream.upload(&[1.5f32], Category::Workspace, "after").unwrap();
        assert_eq!(bench.down::<f32>(&after), [1.5]);
    }
}

#[cfg(target_os = "linux")]
#[test]
fn an_update_behind_a_failure_changes_nothing() {
    use common::failures::{FAILURES, leaves_weights_alone};
    for (fail, expected) in FAILURES {
        for device in [cpu(2), Device::sim(SimOptions::default()).unwrap()] {
            leaves_weights_alone(device, fail, expected);
        }
    }
}
