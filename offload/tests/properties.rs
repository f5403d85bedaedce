//! Whatever is saved comes back: any values under any codec through any tier, and any program of saves, loads, views and
//! drops, whatever the budget and the windows.

mod common;

use common::{DISK, HOST, KEEP, disk, slow};
use ebbtide_kernels::{
    Category, CpuOptions, DType, Device, Error, Op, SimOptions, Slice, Stream,
    op::{Rounding, int8_bytes},
};
use ebbtide_offload::{Activation, Codec, Offload, OffloadOptions, Placement, Role, Saved, Tier};
use half::{bf16, f16};
use proptest::prelude::*;

fn cases(usual: u32, soak: u32) -> ProptestConfig {
    ProptestConfig::with_cases(if std::env::var_os("EBBTIDE_SOAK").is_some() { soak } else { usual })
}

/// Any f32: normal, subnormal, zero, huge, NaN, infinite, and mixtures.
fn values() -> impl Strategy<Value = Vec<f32>> {
    let special =
        [0.0, -0.0, f32::MAX, f32::MIN, f32::MIN_POSITIVE, f32::NAN, f32::INFINITY, f32::NEG_INFINITY];
    (1usize..700, 0u8..6, any::<u64>()).prop_map(move |(len, class, seed)| {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut of_class = |class| match class {
            0 => 8.0 * random.f32() - 4.0,
            1 => f32::from_bits(random.u32(..)),
            2 => f32::from_bits(random.u32(..1 << 23)),
            3 => 2f32.powi(random.i32(-40..40)),
            4 => 0.0,
            _ => special[random.usize(..special.len())],
        };
        (0..len)
            .map(|i| match class {
                5 => of_class([0, 1, 2, 3, 5][i * 7 % 5]),
                // One odd element among many of a kind.
                class if i == len / 2 => of_class(class.wrapping_add(seed as u8) % 6),
                class => of_class(class),
            })
            .collect()
    })
}

const CODECS: [Codec; 8] = [
    Codec::Raw,
    Codec::F16,
    Codec::BF16,
    Codec::Int8 { group: 64, stochastic: None },
    Codec::Int8 { group: 128, stochastic: None },
    Codec::Int8 { group: 256, stochastic: None },
    Codec::Int8 { group: 128, stochastic: Some(5) },
    Codec::Bits,
];

const PLACES: [Option<Tier>; 3] = [None, Some(Tier::Host), Some(Tier::Disk)];

/// A runtime whose policy is in the names: `place codec …`.
fn runtime(device: &Device, options: OffloadOptions) -> (Stream, Offload) {
    let compute = device.stream("compute");
    let policy = |activation: &Activation<'_>| {
        let digit = |at: usize| usize::from(activation.name.as_bytes()[at] - b'0');
        let codec = CODECS[digit(1)];
        PLACES[digit(0)].map_or(Placement::Keep(codec), |tier| Placement::Offload(tier, codec))
    };
    (compute.clone(), Offload::new(&compute, Box::new(policy), options).unwrap())
}

fn tight() -> OffloadOptions {
    OffloadOptions {
        in_flight_bytes: 0,
        prefetch_bytes: 0,
        window_slices: 0,
        min_bytes: 0,
        host_bytes: Some(1 << 20),
        disk: disk(1 << 20),
        ..OffloadOptions::default()
    }
}

fn save(offload: &Offload, slice: &Slice, name: &str, role: Role) -> Result<Saved, Error> {
    let (shape, dtype) = (&[slice.len()], slice.dtype());
    offload.save(slice.clone(), &Activation { name, shape, dtype, role, segment: None, rerun: false })
}

/// What the codec makes of f32 values, held against its contract element by element.
fn expected(stream: &Stream, codec: Codec, values: &[f32], found: &[f32]) {
    expected_rounded(stream, codec, values, found, |_| 0.0);
}

/// So, where what comes back is off by as much as `rounding` says beside.
fn expected_rounded(
    stream: &Stream,
    codec: Codec,
    values: &[f32],
    found: &[f32],
    rounding_of: impl Fn(f64) -> f64,
) {
    match codec {
        Codec::Raw | Codec::Bits => assert!(same(found, values)),
        Codec::F16 => {
            let through: Vec<f32> = values.iter().map(|&x| f16::from_f32(x).to_f32()).collect();
            assert!(same(found, &through));
        }
        Codec::BF16 => {
            let through: Vec<f32> = values.iter().map(|&x| bf16::from_f32(x).to_f32()).collect();
            assert!(same(found, &through));
        }
        Codec::Int8 { group, stochastic } => {
            // The scales are the same for either rounding.
            let device = stream.device();
            let input = stream.upload(values, Category::Workspace, "x").unwrap();
            let bytes = int8_bytes(values.len(), group);
            let out = device.alloc(bytes, DType::U8, Category::Workspace, "x").unwrap();
            let rounding = Rounding::Nearest;
            stream.submit(Op::Int8Encode { input, out: out.clone(), group, rounding }).unwrap();
            let scales = stream.download::<u8>(&out).unwrap();
            let scale = |i: usize| {
                let at = 4 * (i / group);
                f64::from(f32::from_ne_bytes([scales[at], scales[at + 1], scales[at + 2], scales[at + 3]]))
            };
            for (i, (&x, &y)) in values.iter().zip(found).enumerate() {
                if !x.is_finite() {
                    assert!(!y.is_finite(), "{x} came back as {y}");
                    continue;
                }
                let most =
                    if stochastic.is_some() { scale(i) * (1.0 + 2f64.powi(-16)) } else { scale(i) / 2.0 };
                let error = (f64::from(x) - f64::from(y)).abs();
                let most = most + rounding_of(f64::from(y).abs());
                assert!(error <= most, "{codec}: {x} came back as {y}, scale {}", scale(i));
                assert!(y == 0.0 || (x < 0.0) == (y < 0.0) || stochastic.is_some(), "{codec}: {x} as {y}");
            }
        }
    }
}

/// Equal bits, or NaN on both sides.
fn same(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan())
}

thread_local! {
    /// Made once: what is saved is dropped in the end, and leaves nothing.
    static RUNTIME: (Stream, Offload) = {
        let device = Device::cpu_with(CpuOptions { threads: Some(1), budget_bytes: None }).unwrap();
        runtime(&device, tight())
    };
}

proptest! {
    // Each case is 8 codecs by 3 places of the values, and 4 other dtypes beside.
    #![proptest_config(cases(4_000, 40_000))]

    #[test]
    fn values_come_back_through_every_codec_and_tier(values in values(), step: u32) {
        RUNTIME.with(|(stream, offload)| {
            offload.begin_forward(step);
            let original = stream.upload(&values, Category::Activations, "x").unwrap();
            for (c, codec) in CODECS.into_iter().enumerate() {
                let mut kept = None;
                for (place, tier) in PLACES.into_iter().enumerate() {
                    // A copy is another slice: saved twice, one would share what was saved first.
                    let slice = stream.device().alloc(values.len(), DType::F32, Category::Activations, "x").unwrap();
                    stream.submit(Op::Copy { input: original.clone(), out: slice.clone() }).unwrap();
                    // The name keys stochastic rounding, and here the place too: all three have one length.
                    let saved = save(offload, &slice, &format!("{place}{c}"), Role::Activation).unwrap();
                    drop(slice);
                    let found = stream.download::<f32>(&offload.load(&saved).unwrap()).unwrap();
                    expected(stream, codec, &values, &found);
                    if !matches!(codec, Codec::Int8 { stochastic: Some(_), .. }) {
                        let kept = kept.get_or_insert_with(|| found.clone());
                        assert!(same(kept, &found), "{codec} through {tier:?}");
                    }
                }
            }
            // Integers are exact whatever the policy says, and 16-bit floats under all but int8; masks are, as bits.
            let bytes: Vec<u8> = values.iter().map(|x| x.to_bits() as u8).collect();
            let mask: Vec<u8> = bytes.iter().map(|byte| byte & 1).collect();
            let words: Vec<u32> = values.iter().map(|x| x.to_bits()).collect();
            let halves: Vec<f16> = words.iter().map(|&word| f16::from_bits(word as u16)).collect();
            let name = format!("{}{}", step % 3, step / 3 % 8);
            let through = |slice: Slice, role| offload.load(&save(offload, &slice, &name, role).unwrap()).unwrap();
            let up = |bytes: &[u8]| stream.upload(bytes, Category::Activations, "x").unwrap();
            let found = stream.download::<u8>(&through(up(&bytes), Role::Activation)).unwrap();
            assert_eq!(found, bytes);
            assert_eq!(stream.download::<u8>(&through(up(&mask), Role::Mask)).unwrap(), mask);
            let slice = stream.upload(&words, Category::Activations, "x").unwrap();
            assert_eq!(stream.download::<u32>(&through(slice, Role::Activation)).unwrap(), words);
            let codec = CODECS[(step / 3 % 8) as usize];
            let lossless = !matches!(codec, Codec::Int8 { .. });
            let slice = stream.upload(&halves, Category::Activations, "x").unwrap();
            let found = stream.download::<f16>(&through(slice, Role::Activation)).unwrap();
            assert!(!lossless || found.iter().zip(&halves).all(|(a, b)| a.to_bits() == b.to_bits()));
            if !lossless {
                let wide = |halves: &[f16]| halves.iter().map(|x| x.to_f32()).collect::<Vec<_>>();
                let half_unit = |y: f64| (y * 2f64.powi(-11)).max(2f64.powi(-25));
                expected_rounded(stream, codec, &wide(&halves), &wide(&found), half_unit);
            }
            let halves: Vec<bf16> = words.iter().map(|&word| bf16::from_bits((word >> 16) as u16)).collect();
            let slice = stream.upload(&halves, Category::Activations, "x").unwrap();
            let found = stream.download::<bf16>(&through(slice, Role::Activation)).unwrap();
            assert!(!lossless || found.iter().zip(&halves).all(|(a, b)| a.to_bits() == b.to_bits()));
            if !lossless {
                let wide = |halves: &[bf16]| halves.iter().map(|x| x.to_f32()).collect::<Vec<_>>();
                let half_unit = |y: f64| (y * 2f64.powi(-8)).max(2f64.powi(-134));
                expected_rounded(stream, codec, &wide(&halves), &wide(&found), half_unit);
            }
            let slice = stream.upload(&values, Category::Activations, "x").unwrap();
            assert!(same(&stream.download::<f32>(&through(slice, Role::Statistic)).unwrap(), &values));
        });
    }
}

/// A step of a random program. Numbers pick among what there is.
#[derive(Clone, Debug)]
enum Action {
    Make { len: usize },
    Save { which: usize, place: usize },
    SavePart { which: usize, place: usize },
    Load { which: usize },
    View { which: usize },
    Write { which: usize },
    Forget { which: usize },
    DropSlice { which: usize },
    Forward,
    Backward,
    Abandon,
}

fn actions() -> impl Strategy<Value = Vec<Action>> {
    let which = 0usize..64;
    let place = 0usize..3;
    let action = prop_oneof![
        4 => prop_oneof![1usize..64, Just(1024usize), Just(5000)].prop_map(|len| Action::Make { len }),
        4 => (which.clone(), place.clone()).prop_map(|(which, place)| Action::Save { which, place }),
        1 => (which.clone(), place).prop_map(|(which, place)| Action::SavePart { which, place }),
        3 => which.clone().prop_map(|which| Action::Load { which }),
        1 => which.clone().prop_map(|which| Action::View { which }),
        1 => which.clone().prop_map(|which| Action::Write { which }),
        2 => which.clone().prop_map(|which| Action::Forget { which }),
        2 => which.prop_map(|which| Action::DropSlice { which }),
        1 => Just(Action::Forward),
        1 => Just(Action::Backward),
        1 => Just(Action::Abandon),
    ];
    prop::collection::vec(action, 1..60)
}

/// A slice and the value that all its elements should have.
type Known = (Slice, f32);

/// Runs a program; what was loaded is looked at in the end alone, so that nothing on the way waits.
fn run(device: &Device, options: OffloadOptions, actions: &[Action]) {
    let compute = device.stream("compute");
    let policy =
        |activation: &Activation<'_>| [KEEP, HOST, DISK][usize::from(activation.name.as_bytes()[0] - b'0')];
    let offload = Offload::new(&compute, Box::new(policy), options).unwrap();
    let mut slices: Vec<Known> = Vec::new();
    // Only the handle: the slice itself would keep its memory.
    let mut saved: Vec<(Saved, f32)> = Vec::new();
    let mut seen: Vec<Known> = Vec::new();
    let mut value = 0.0;
    let full = |error: Error| assert!(matches!(error, Error::OutOfMemory(_)), "{error}");
    for action in actions {
        match *action {
            Action::Make { len } => {
                value += 1.0;
                match offload.alloc(len, DType::F32, Category::Activations, "x") {
                    Ok(out) => {
                        compute.submit(Op::Fill { out: out.clone(), value }).unwrap();
                        slices.push((out, value));
                    }
                    Err(error) => full(error),
                }
            }
            Action::Save { which, place } if !slices.is_empty() => {
                let (slice, value) = &slices[which % slices.len()];
                let handle = save(&offload, slice, &place.to_string(), Role::Activation).unwrap();
                saved.push((handle, *value));
            }
            Action::SavePart { which, place } if !slices.is_empty() => {
                let (slice, value) = &slices[which % slices.len()];
                let part = slice.part(slice.len() / 3..slice.len()).unwrap();
                let handle = save(&offload, &part, &place.to_string(), Role::Activation).unwrap();
                saved.push((handle, *value));
            }
            Action::Load { which } if !saved.is_empty() => {
                let (handle, value) = &saved[which % saved.len()];
                match offload.load(handle) {
                    Ok(slice) => seen.push((slice, *value)),
                    Err(error) => full(error),
                }
            }
            Action::View { which } if !saved.is_empty() => {
                let (handle, value) = &saved[which % saved.len()];
                match offload.load(handle) {
                    Ok(slice) => seen.push((slice.part(slice.len() / 2..slice.len()).unwrap(), *value)),
                    Err(error) => full(error),
                }
            }
            Action::Write { which } if !slices.is_empty() => {
                let which = which % slices.len();
                let out = slices[which].0.clone();
                // Other handles may look at it: only one that is alone is written.
                let watched = seen.iter().any(|(slice, _)| slice.buffer_id() == out.buffer_id());
                if watched && !out.is_protected() {
                    continue;
                }
                value += 1.0;
                match compute.submit(Op::Fill { out: out.clone(), value }) {
                    Ok(()) => {
                        assert!(!out.is_protected());
                        slices[which].1 = value;
                    }
                    Err(Error::Protected { .. }) => assert!(out.is_protected()),
                    Err(error) => panic!("{error}"),
                }
            }
            Action::Forget { which } if !saved.is_empty() => drop(saved.swap_remove(which % saved.len())),
            Action::DropSlice { which } if !slices.is_empty() => {
                drop(slices.swap_remove(which % slices.len()))
            }
            Action::Forward => offload.begin_forward(value as u32),
            Action::Backward => offload.begin_backward(),
            Action::Abandon => {
                slices.clear();
                saved.clear();
            }
            _ => {}
        }
    }
    device.synchronize().unwrap();
    for (slice, value) in &seen {
        assert!(compute.download::<f32>(slice).unwrap().iter().all(|x| x == value), "expected {value}");
    }
    // Whatever is saved still is there.
    seen.clear();
    slices.clear();
    while let Some((handle, value)) = saved.pop() {
        match offload.load(&handle) {
            Ok(slice) => assert!(compute.download::<f32>(&slice).unwrap().iter().all(|&x| x == value)),
            Err(error) => full(error),
        }
    }
    assert_eq!((offload.live(), device.in_use_bytes()), (0, 0));
    assert!(Tier::ALL.into_iter().all(|tier| offload.tier_usage(tier).0 == 0));
}

fn options() -> impl Strategy<Value = OffloadOptions> {
    let bytes = || prop_oneof![Just(0usize), 1usize..10_000, Just(1 << 20)];
    (bytes(), bytes(), bytes(), 0usize..3, bytes()).prop_map(
        |(in_flight_bytes, prefetch_bytes, host, min, disk_bytes)| OffloadOptions {
            in_flight_bytes,
            prefetch_bytes,
            window_slices: 0,
            min_bytes: [0, 0, 128][min],
            host_bytes: Some(host),
            disk: (disk_bytes > 0).then(|| disk(disk_bytes).unwrap()),
            ..OffloadOptions::default()
        },
    )
}

proptest! {
    #![proptest_config(cases(1_500, 50_000))]

    #[test]
    fn any_program_gives_back_what_it_saved(
        actions in actions(),
        options in options(),
        budget in prop_oneof![Just(None), (8usize..200).prop_map(|kib| Some(kib << 10))],
        seed: u64,
        slowness in 0usize..3,
    ) {
        let slow_streams = [vec![], slow().slow_streams, vec!["offload in".to_string(), "disk out 0".to_string()]];
        let slow_streams = slow_streams[slowness].clone();
        let sim = SimOptions { seed, budget_bytes: budget, slow_streams, ..SimOptions::default() };
        run(&Device::sim(sim).unwrap(), options.clone(), &actions);
        if seed.is_multiple_of(8) {
            let cpu = CpuOptions { threads: Some(2), budget_bytes: budget };
            run(&Device::cpu_with(cpu).unwrap(), options, &actions);
        }
    }
}
