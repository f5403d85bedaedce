//! What every op promises whatever it computes, held for one list of all ops: what is refused at submission, and that
//! what it writes is written whole, with the same bits on any number of threads and on the simulated device.

mod common;

use common::{Bench, cpu, random};
use ebbtide_kernels::{
    Category, DType, Device, Error, Op, SimOptions, Slice,
    op::{
        AdamW, Attention, AttentionBackward, AttentionShape, CrossEntropy, Dropout, Embedding,
        EmbeddingBackward, GeluKind, Gemm, LayerNorm, LayerNormApply, LayerNormBackward, Layout, Mode, Place,
        Residual, reduce_workspace,
    },
};
use proptest::prelude::*;

/// Sizes that every op of [`OPS`] is made of.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    batch: usize,
    context: usize,
    heads: usize,
    head_size: usize,
    /// At least 3: tokens are below it.
    vocabulary: usize,
    probability: f32,
}

impl Sizes {
    fn rows(&self) -> usize {
        self.batch * self.context
    }
    fn width(&self) -> usize {
        self.heads * self.head_size
    }
    fn size(&self) -> usize {
        self.rows() * self.width()
    }
    fn attention(&self) -> AttentionShape {
        let &Sizes { batch, context, heads, head_size, .. } = self;
        AttentionShape { batch, context, heads, head_size, scale: 1.0 / (head_size as f32).sqrt() }
    }
    fn dropout(&self) -> Dropout {
        Dropout { probability: self.probability, seed: 0xFEED_5EED_0123, site: 4, step: 2 }
    }
}

const SMALL: Sizes = Sizes { batch: 2, context: 3, heads: 2, head_size: 5, vocabulary: 7, probability: 0.25 };

/// Gives an operand of so many elements.
type New<'a> = &'a mut dyn FnMut(usize, DType) -> Slice;

/// Every op, with and without each of its options.
const OPS: &[fn(Sizes, New<'_>) -> Op] = &[
    |s, new| Op::Fill { out: new(s.size(), DType::BF16), value: 0.3 },
    |s, new| Op::Copy { input: new(s.size(), DType::F16), out: new(s.size(), DType::F16) },
    |s, new| Op::Cast { input: new(s.size(), DType::F32), out: new(s.size(), DType::F16) },
    |s, new| Op::Cast { input: new(s.size(), DType::F16), out: new(s.size(), DType::BF16) },
    |s, new| Op::Cast { input: new(s.size(), DType::BF16), out: new(s.size(), DType::F32) },
    |s, new| Op::Cast { input: new(s.size(), DType::F32), out: new(s.size(), DType::F32) },
    |s, new| Op::MaxDifference {
        input: new(s.size(), DType::F32),
        other: new(s.size(), DType::F32),
        out: new(1, DType::F32),
    },
    |s, new| Op::Checksum { input: new(s.size(), DType::F32), out: new(2, DType::U32) },
    |s, new| Op::Add { input: new(s.size(), DType::F32), out: new(s.size(), DType::F32) },
    |s, new| Op::Dropout { data: new(s.size(), DType::F32), dropout: s.dropout() },
    |s, new| gemm(s, new, Layout::Normal, Layout::Normal, true, false),
    |s, new| gemm(s, new, Layout::Normal, Layout::Transposed, false, false),
    |s, new| gemm(s, new, Layout::Transposed, Layout::Normal, false, true),
    |s, new| gemm(s, new, Layout::Transposed, Layout::Transposed, true, true),
    |s, new| Op::BiasBackward {
        dout: new(s.size(), DType::F32),
        dbias: new(s.width(), DType::F32),
        workspace: new(reduce_workspace(s.rows(), s.width()), DType::F32),
        rows: s.rows(),
        width: s.width(),
    },
    |s, new| gelu(s, new, GeluKind::Tanh),
    |s, new| gelu(s, new, GeluKind::Erf),
    |s, new| gelu_backward(s, new, GeluKind::Tanh),
    |s, new| gelu_backward(s, new, GeluKind::Erf),
    |s, new| layer_norm(s, new, None),
    |s, new| layer_norm(s, new, Some(None)),
    |s, new| layer_norm(s, new, Some(Some(s.dropout()))),
    |s, new| {
        Op::LayerNormApply(LayerNormApply {
            input: new(s.size(), DType::F32),
            weight: new(s.width(), DType::F32),
            bias: new(s.width(), DType::F32),
            mean: new(s.rows(), DType::F32),
            rstd: new(s.rows(), DType::F32),
            out: new(s.size(), DType::F32),
            rows: s.rows(),
            width: s.width(),
        })
    },
    |s, new| layer_norm_backward(s, new, false, false),
    |s, new| layer_norm_backward(s, new, false, true),
    |s, new| layer_norm_backward(s, new, true, false),
    |s, new| layer_norm_backward(s, new, true, true),
    |s, new| attention(s, new, None),
    |s, new| attention(s, new, Some(s.dropout())),
    |s, new| attention_backward(s, new, None),
    |s, new| attention_backward(s, new, Some(s.dropout())),
    |s, new| embedding(s, new, None),
    |s, new| embedding(s, new, Some(s.dropout())),
    |s, new| embedding_backward(s, new, None),
    |s, new| embedding_backward(s, new, Some(s.dropout())),
    |s, new| cross_entropy(s, new, None),
    |s, new| cross_entropy(s, new, Some(0.7)),
    |s, new| Op::Sum { input: new(s.size(), DType::F32), out: new(1, DType::F32), scale: 0.3 },
    |s, new| Op::SumSquares { input: new(s.size(), DType::F32), out: new(1, DType::F32) },
    |s, new| Op::ClipCoefficient {
        sum_squares: new(s.rows(), DType::F32),
        norm: new(1, DType::F32),
        coefficient: new(1, DType::F32),
        max_norm: 0.5,
    },
    |s, new| adamw(s, new, false),
    |s, new| adamw(s, new, true),
];

fn gemm(s: Sizes, new: New<'_>, a_layout: Layout, b_layout: Layout, bias: bool, accumulate: bool) -> Op {
    let (m, n, k) = (s.rows(), s.width(), s.vocabulary);
    Op::Gemm(Gemm {
        a: new(m * k, DType::F32),
        a_layout,
        b: new(k * n, DType::F32),
        b_layout,
        bias: bias.then(|| new(n, DType::F32)),
        out: new(m * n, DType::F32),
        accumulate,
        m,
        n,
        k,
    })
}

fn gelu(s: Sizes, new: New<'_>, kind: GeluKind) -> Op {
    Op::Gelu { input: new(s.size(), DType::F32), out: new(s.size(), DType::F32), kind }
}

fn gelu_backward(s: Sizes, new: New<'_>, kind: GeluKind) -> Op {
    Op::GeluBackward { input: new(s.size(), DType::F32), gradient: new(s.size(), DType::F32), kind }
}

fn layer_norm(s: Sizes, new: New<'_>, residual: Option<Option<Dropout>>) -> Op {
    Op::LayerNorm(LayerNorm {
        input: new(s.size(), DType::F32),
        residual: residual.map(|dropout| Residual {
            input: new(s.size(), DType::F32),
            out: new(s.size(), DType::F32),
            dropout,
        }),
        weight: new(s.width(), DType::F32),
        bias: new(s.width(), DType::F32),
        out: new(s.size(), DType::F32),
        mean: new(s.rows(), DType::F32),
        rstd: new(s.rows(), DType::F32),
        rows: s.rows(),
        width: s.width(),
        epsilon: 1e-5,
    })
}

fn layer_norm_backward(s: Sizes, new: New<'_>, accumulate: bool, ddelta: bool) -> Op {
    Op::LayerNormBackward(LayerNormBackward {
        dout: new(s.size(), DType::F32),
        input: new(s.size(), DType::F32),
        weight: new(s.width(), DType::F32),
        mean: new(s.rows(), DType::F32),
        rstd: new(s.rows(), DType::F32),
        dinput: new(s.size(), DType::F32),
        accumulate,
        ddelta: ddelta.then(|| (new(s.size(), DType::F32), s.dropout())),
        dweight: new(s.width(), DType::F32),
        dbias: new(s.width(), DType::F32),
        workspace: new(reduce_workspace(s.rows(), 2 * s.width()), DType::F32),
        rows: s.rows(),
        width: s.width(),
    })
}

fn attention(s: Sizes, new: New<'_>, dropout: Option<Dropout>) -> Op {
    Op::Attention(Attention {
        qkv: new(3 * s.size(), DType::F32),
        out: new(s.size(), DType::F32),
        lse: new(s.attention().rows(), DType::F32),
        shape: s.attention(),
        dropout,
    })
}

fn attention_backward(s: Sizes, new: New<'_>, dropout: Option<Dropout>) -> Op {
    Op::AttentionBackward(AttentionBackward {
        dout: new(s.size(), DType::F32),
        qkv: new(3 * s.size(), DType::F32),
        out: new(s.size(), DType::F32),
        lse: new(s.attention().rows(), DType::F32),
        dqkv: new(3 * s.size(), DType::F32),
        workspace: new(s.attention().rows(), DType::F32),
        shape: s.attention(),
        dropout,
    })
}

fn embedding(s: Sizes, new: New<'_>, dropout: Option<Dropout>) -> Op {
    Op::Embedding(Embedding {
        tokens: new(s.rows(), DType::U32),
        wte: new(s.vocabulary * s.width(), DType::F32),
        wpe: new(s.context * s.width(), DType::F32),
        out: new(s.size(), DType::F32),
        batch: s.batch,
        context: s.context,
        width: s.width(),
        vocabulary: s.vocabulary,
        dropout,
    })
}

fn embedding_backward(s: Sizes, new: New<'_>, dropout: Option<Dropout>) -> Op {
    Op::EmbeddingBackward(EmbeddingBackward {
        tokens: new(s.rows(), DType::U32),
        dout: new(s.size(), DType::F32),
        dwte: new(s.vocabulary * s.width(), DType::F32),
        dwpe: new(s.context * s.width(), DType::F32),
        batch: s.batch,
        context: s.context,
        width: s.width(),
        vocabulary: s.vocabulary,
        dropout,
    })
}

fn cross_entropy(s: Sizes, new: New<'_>, gradient_scale: Option<f32>) -> Op {
    Op::CrossEntropy(CrossEntropy {
        logits: new(s.rows() * s.vocabulary, DType::F32),
        targets: new(s.rows(), DType::I32),
        losses: new(s.rows(), DType::F32),
        rows: s.rows(),
        vocabulary: s.vocabulary,
        gradient_scale,
        loss_scale: None,
    })
}

fn adamw(s: Sizes, new: New<'_>, scaled: bool) -> Op {
    Op::AdamW(AdamW {
        parameters: new(s.size(), DType::F32),
        gradients: new(s.size(), DType::F32),
        first_moment: new(s.size(), DType::F32),
        second_moment: new(s.size(), DType::F32),
        gradient_scale: scaled.then(|| new(1, DType::F32)),
        scaled: None,
        learning_rate: 0.1,
        beta1: 0.9,
        beta2: 0.99,
        epsilon: 1e-8,
        weight_decay: 0.1,
        step: 3,
    })
}

/// The device operands of an op: name, slice, mode.
fn operands(op: &Op) -> Vec<(&'static str, Slice, Mode)> {
    let device = |place: Place<'_>| match place {
        Place::Device(slice) => slice.clone(),
        Place::Host(_) | Place::File(_) => unreachable!("no op of the list has operands off the device"),
    };
    op.operands().iter().map(|operand| (operand.name, device(operand.place), operand.mode)).collect()
}

/// Writes what the op may read: for each operand numbers of its own.
fn write_inputs(bench: &Bench, op: &Op, seed: u64) {
    for ((name, slice, mode), seed) in operands(op).into_iter().zip(seed..) {
        if mode == Mode::Write {
            continue;
        }
        let numbers = random(seed, slice.len());
        let values = match slice.dtype() {
            DType::U32 => bench.up(&(0..slice.len() as u32).map(|i| i * i % 3).collect::<Vec<_>>()),
            // Every third target is ignored.
            DType::I32 => {
                bench.up(&(0..slice.len() as i32).map(|i| [2, -100, 1][i as usize % 3]).collect::<Vec<_>>())
            }
            _ if matches!(name, "second_moment" | "sum_squares") => {
                bench.up(&numbers.iter().map(|x| x.abs()).collect::<Vec<_>>())
            }
            DType::F32 => bench.up(&numbers),
            dtype => {
                let halves = bench.alloc(slice.len(), dtype);
                bench.run(Op::Cast { input: bench.up(&numbers), out: halves.clone() });
                halves
            }
        };
        bench.run(Op::Copy { input: values, out: slice });
    }
}

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
                    Op::Sum { .. } | Op::SumSquares { .. } | Op::ClipCoefficient { .. } => {
                        wrong == 0 && change.0 != 0
                    }
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
