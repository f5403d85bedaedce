//! Random models, with branches, tensors used twice and views that escape, under random policies, budgets and windows: the loss
//! and every gradient bit for bit as if everything had stayed on the device.

mod common;

use std::cell::RefCell;

use common::{Mixed, device_with, numerics, with_disk};
use ebbtide::{
    engine::{
        DropoutSite, Engine, Error, Init, LossInto, Norm, Numerics, Parameter, Parameters, ParametersBuilder,
        Result, Tape, Tensor, TokenBatch,
    },
    kernels::{self, Category, DType, Device, Op, SimOptions, Slice, op::GeluKind},
    offload::{OffloadOptions, Policy, Tier, policy::Builtin},
};
use proptest::prelude::*;

/// A piece of a model; each gives a tensor of the shape that it was given.
#[derive(Clone, Debug)]
enum Piece {
    Linear,
    Gelu,
    Norm,
    Attention,
    /// The tensor plus dropout of a linear of it: used twice.
    Residual,
    /// A norm of the sum of two branches, both of which see the tensor.
    Branches,
    /// GELU of a tensor that is then added to in place.
    SavedThenAdded,
    /// A part of the tensor that somebody keeps.
    Escape,
}

#[derive(Clone, Debug)]
struct Spec {
    vocabulary: usize,
    context: usize,
    batch: usize,
    heads: usize,
    width: usize,
    dropout: f32,
    numerics: Numerics,
    /// Segments, each a few pieces.
    segments: Vec<Vec<Piece>>,
}

fn specs() -> impl Strategy<Value = Spec> {
    let piece = prop_oneof![
        Just(Piece::Linear),
        Just(Piece::Gelu),
        Just(Piece::Norm),
        Just(Piece::Attention),
        Just(Piece::Residual),
        Just(Piece::Branches),
        Just(Piece::SavedThenAdded),
        Just(Piece::Escape),
    ];
    let segments = prop::collection::vec(prop::collection::vec(piece, 1..4), 1..5);
    (2usize..12, 1usize..9, 1usize..3, 1usize..3, 1usize..9, any::<bool>(), numerics(), segments).prop_map(
        |(vocabulary, context, batch, heads, head_size, drops, numerics, segments)| Spec {
            vocabulary,
            context,
            batch,
            heads,
            width: heads * head_size,
            dropout: if drops { 0.2 } else { 0.0 },
            numerics,
            segments,
        },
    )
}

struct Model {
    spec: Spec,
    parameters: Parameters,
    wte: Parameter,
    wpe: Parameter,
    /// By segment and piece: two matrices with biases, a packed projection, a norm.
    weights: Vec<Vec<Weights>>,
    /// What escaped: parts of activations.
    escaped: RefCell<Vec<Slice>>,
}

struct Weights {
    first: (Parameter, Parameter),
    second: (Parameter, Parameter),
    packed: (Parameter, Parameter),
    norm: Norm,
}

impl Model {
    fn new(engine: &Engine, spec: &Spec) -> Result<Self> {
        let Spec { vocabulary, context, width, .. } = *spec;
        let mut builder = ParametersBuilder::default();
        let normal = Init::Normal { deviation: 0.4 };
        builder.add("wte", &[vocabulary, width], normal);
        builder.add("wpe", &[context, width], normal);
        for (s, pieces) in spec.segments.iter().enumerate() {
            for p in 0..pieces.len() {
                for (name, out) in [("first", width), ("second", width), ("packed", 3 * width)] {
                    builder.add(format!("{s}.{p}.{name}.weight"), &[width, out], normal);
                    builder.add(format!("{s}.{p}.{name}.bias"), &[out], normal);
                }
                builder.add(format!("{s}.{p}.norm.weight"), &[width], Init::Constant(1.0));
                builder.add(format!("{s}.{p}.norm.bias"), &[width], normal);
            }
        }
        let parameters = builder.build(engine, 3, true)?;
        let get = |name: String| parameters.get(&name);
        let weights = |s: usize, p: usize| -> Result<Weights> {
            let pair = |name: &str| -> Result<(Parameter, Parameter)> {
                Ok((get(format!("{s}.{p}.{name}.weight"))?, get(format!("{s}.{p}.{name}.bias"))?))
            };
            let (weight, bias) = pair("norm")?;
            let norm = Norm { weight, bias, epsilon: 1e-5 };
            Ok(Weights { first: pair("first")?, second: pair("second")?, packed: pair("packed")?, norm })
        };
        let all = spec.segments.iter().enumerate();
        let all: Result<Vec<Vec<Weights>>> =
            all.map(|(s, pieces)| (0..pieces.len()).map(|p| weights(s, p)).collect()).collect();
        Ok(Model {
            spec: spec.clone(),
            wte: get("wte".to_string())?,
            wpe: get("wpe".to_string())?,
            weights: all?,
            parameters,
            escaped: RefCell::default(),
        })
    }

    fn piece<'m>(&'m self, tape: &mut Tape<'m>, x: Tensor, s: usize, p: usize) -> Result<Tensor> {
        let weights = &self.weights[s][p];
        let site =
            |i: u32| DropoutSite { probability: self.spec.dropout, site: 100 * s as u32 + 10 * p as u32 + i };
        let linear = |tape: &mut Tape<'m>, x, (weight, bias): &'m (Parameter, Parameter)| {
            tape.linear(x, weight, Some(bias))
        };
        match self.spec.segments[s][p] {
            Piece::Linear => linear(tape, x, &weights.first),
            Piece::Gelu => tape.gelu(x, GeluKind::Tanh),
            Piece::Norm => tape.layer_norm(x, &weights.norm),
            Piece::Attention => {
                let packed = linear(tape, x, &weights.packed)?;
                tape.attention(packed, self.spec.heads, site(0))
            }
            Piece::Residual => {
                let delta = linear(tape, x.clone(), &weights.first)?;
                tape.residual_add(x, delta, site(0))
            }
            Piece::Branches => {
                let left = tape.scope("left", |tape| linear(tape, x.clone(), &weights.first))?;
                let right = tape.scope("right", |tape| {
                    let normed = tape.layer_norm(x, &weights.norm)?;
                    linear(tape, normed, &weights.second)
                })?;
                let (sum, normed) = tape.residual_norm(left, right, &weights.norm, site(1))?;
                let active = tape.gelu(normed, GeluKind::Erf)?;
                tape.residual_add(sum, active, site(2))
            }
            Piece::SavedThenAdded => {
                let delta = linear(tape, x.clone(), &weights.first)?;
                let active = tape.gelu(delta.clone(), GeluKind::Tanh)?;
                let sum = tape.residual_add(x, delta, site(0))?;
                tape.residual_add(sum, active, site(1))
            }
            Piece::Escape => {
                let part = x.slice().part(0..x.slice().len().div_ceil(2))?;
                // Once: a segment that runs again would let the same values escape again.
                let escaped = &self.escaped;
                tape.once(format_args!("escape.{p}"), |_| {
                    escaped.borrow_mut().push(part);
                    Ok(())
                })?;
                tape.gelu(x, GeluKind::Tanh)
            }
        }
    }
}

/// The loss, every gradient, and what escaped, as bits.
fn bits(
    device: &Device,
    policy: Box<dyn Policy>,
    options: OffloadOptions,
    spec: &Spec,
) -> Result<Vec<Vec<u32>>> {
    let engine = Engine::with_numerics(device, policy, options, spec.numerics)?;
    let model = Model::new(&engine, spec)?;
    let mut all = Vec::new();
    for step in 1..3 {
        model.escaped.borrow_mut().clear();
        let len = spec.batch * spec.context;
        let token = |i: usize| (7 * i + 3 * step as usize) % spec.vocabulary;
        let tokens: Vec<u32> = (0..len).map(|i| token(i) as u32).collect();
        let targets: Vec<i32> = (0..len).map(|i| token(i + 1) as i32).collect();
        let compute = engine.compute();
        let batch = TokenBatch {
            tokens: compute.upload(&tokens, Category::Staging, "tokens")?,
            targets: Some(compute.upload(&targets, Category::Staging, "targets")?),
            batch: spec.batch,
            context: spec.context,
        };
        let sum = engine.offload().alloc(1, DType::F32, Category::Workspace, "loss")?;
        compute.submit(Op::Fill { out: sum.clone(), value: 0.0 })?;
        let mut tape = Tape::train(&engine, 9, step);
        let site = DropoutSite { probability: spec.dropout, site: 7 };
        let mut x = tape.embedding(&batch, &model.wte, &model.wpe, site)?;
        for s in 0..spec.segments.len() {
            let model = &model;
            x = tape.segment(format_args!("s.{s}"), x, move |tape, mut x| {
                for p in 0..model.spec.segments[s].len() {
                    x = tape.scope(format_args!("p.{p}"), |tape| model.piece(tape, x, s, p))?;
                }
                Ok(x)
            })?;
        }
        let into = LossInto { sum: sum.clone(), weight: 1.0 / len as f32, loss_scale: None };
        let loss = tape.head_loss(&x, &model.wte, &batch, &into)?;
        drop(x);
        tape.backward(loss)?;
        let gradients = model.parameters.gradients().expect("a trained model").clone();
        let mut slices = vec![sum, gradients];
        slices.extend(model.escaped.borrow().iter().cloned());
        for slice in slices {
            // Exact, whatever it is in.
            let out = device.alloc(slice.len(), DType::F32, Category::Workspace, "result")?;
            compute.submit(Op::Cast { input: slice, out: out.clone() })?;
            all.push(compute.download::<f32>(&out)?.iter().map(|x| x.to_bits()).collect());
        }
    }
    device.synchronize()?;
    assert_eq!(engine.offload().live(), 0);
    assert!(Tier::ALL.into_iter().all(|tier| engine.offload().tier_usage(tier).0 == 0));
    Ok(all)
}

proptest! {
    // Each case is a model under three policies on the CPU and one in simulation.
    #![proptest_config(ProptestConfig::with_cases(if std::env::var_os("EBBTIDE_SOAK").is_some() { 5000 } else { 400 }))]

    #[test]
    fn every_policy_gives_the_same_bits(
        spec in specs(),
        mix: u64,
        in_flight_bytes in prop_oneof![Just(0usize), 1usize..4096],
        prefetch_bytes in prop_oneof![Just(0usize), 1usize..4096],
        share in 0.0f64..2.4,
    ) {
        let cpu = |budget_bytes| device_with(Some(2), budget_bytes);
        let options = OffloadOptions { in_flight_bytes, prefetch_bytes, min_bytes: 0, window_slices: 0, ..OffloadOptions::default() };
        let device = cpu(None);
        let expected = bits(&device, Builtin::Keep.policy(), OffloadOptions::default(), &spec).unwrap();
        let most = device.memory().extent_bytes;
        let of_mix = |i| -> Box<dyn Policy> { Box::new(Mixed(mix.wrapping_add(i))) };
        prop_assert_eq!(&bits(&cpu(None), of_mix(0), with_disk(options.clone()), &spec).unwrap(), &expected);
        let offload = Builtin::Offload.policy();
        prop_assert_eq!(&bits(&cpu(None), offload, options.clone(), &spec).unwrap(), &expected);
        // Within a budget it runs with the same bits, or says that it does not fit: a mix lays its memory out otherwise, and may
        // need more of it.
        let budget = (most as f64 * share) as usize;
        match bits(&cpu(Some(budget)), of_mix(1), with_disk(options.clone()), &spec) {
            Ok(found) => prop_assert_eq!(&found, &expected),
            Err(Error::Device(kernels::Error::OutOfMemory(facts))) => prop_assert!(share < 2.0, "{}", facts),
            Err(error) => panic!("{error}"),
        }
        // The simulated device has the CPU's kernels.
        if device.backend_name() != "cpu" {
            return Ok(());
        }
        let slow = ["offload out", "offload in", "disk out", "disk in", "disk out 0", "disk in 1"];
        let slow_streams = slow.map(str::to_string)[..(mix % 7) as usize].to_vec();
        let device = Device::sim(SimOptions { seed: mix, slow_streams, ..SimOptions::default() }).unwrap();
        prop_assert_eq!(&bits(&device, of_mix(2), with_disk(options), &spec).unwrap(), &expected);
    }
}
