//! What a failure leaves alone: an update that was queued behind it.

use std::{fs::OpenOptions, os::unix::fs::FileExt, path::Path};

use ebbtide_kernels::{
    DType, Device, Element, FILE_ALIGNMENT, Op, Slice, SpillOptions,
    op::{AdamW, Embedding, Scaled, ScalerCounter, ScalerRules},
};

use super::{
    Bench,
    ops::{SMALL, adamw, embedding},
};

/// Queues an op that fails; the slice is the gradients of the update behind it.
pub(crate) type Fail = fn(&Bench, Slice);

/// An index outside of its vocabulary, and bytes of a file that are not those that were written; what the errors say.
pub(crate) const FAILURES: [(Fail, &str); 2] = [
    (wrong_index, "token 7 at index 4 is outside of the vocabulary of 7"),
    (damaged_file, "are not those that were written"),
];

/// Queues an op that fails and the update of a step behind it, and waits only then. Weights, moments and the loss scale are as they
/// were, and the device is usable.
pub(crate) fn leaves_weights_alone(device: Device, fail: Fail, expected: &str) {
    let bench = Bench::new(device);
    let Op::AdamW(update) = adamw(SMALL, &mut |len, dtype| bench.alloc(len, dtype), false) else {
        unreachable!()
    };
    let AdamW { parameters, gradients, first_moment, second_moment, .. } = update.clone();
    for (value, out) in
        [(1.0, &parameters), (0.5, &gradients), (0.25, &first_moment), (0.125, &second_moment)]
    {
        bench.run(Op::Fill { out: out.clone(), value });
    }
    let (scale, found_inf) = (bench.up(&[8f32]), bench.up(&[0f32]));
    let counters = bench.up(&[0u32; ScalerCounter::COUNT]);
    let scaled = Some(Scaled { found_inf: found_inf.clone(), counters: counters.clone() });
    let rules = ScalerRules { growth: 2.0, backoff: 0.5, interval: 1, floor: 1.0, hysteresis: 1 };
    let step = [
        Op::AdamW(AdamW { scaled, ..update }),
        Op::ScalerUpdate { scale: scale.clone(), counters: counters.clone(), found_inf, rules },
    ];
    let state = || {
        let floats =
            [&parameters, &first_moment, &second_moment, &scale].map(|slice| bench.down::<f32>(slice));
        (floats, bench.down::<u32>(&counters))
    };
    let before = state();
    fail(&bench, gradients.clone());
    step.iter().for_each(|op| bench.run(op.clone()));
    let error = bench.device.synchronize().unwrap_err().to_string();
    assert!(error.contains(expected), "{error}");
    assert_eq!(state(), before, "after `{expected}`");
    bench.run(Op::Fill { out: gradients, value: 0.5 });
    step.iter().for_each(|op| bench.run(op.clone()));
    let ([weights, .., scale], counters) = state();
    assert!(weights != before.0[0] && scale == [16.0] && counters[ScalerCounter::Applied as usize] == 1);
}

fn wrong_index(bench: &Bench, _: Slice) {
    let op = embedding(SMALL, &mut |len, dtype| bench.alloc(len, dtype), None);
    let Op::Embedding(Embedding { tokens, wte, wpe, .. }) = &op else { unreachable!() };
    let mut wrong = vec![0u32; tokens.len()];
    wrong[4] = 7;
    bench.run(Op::Copy { input: bench.up(&wrong), out: tokens.clone() });
    for table in [wte, wpe] {
        bench.run(Op::Fill { out: table.clone(), value: 1.0 });
    }
    bench.run(op);
}

/// The gradients come from a file, on a stream of its own.
fn damaged_file(bench: &Bench, gradients: Slice) {
    let folder = tempfile::tempdir().unwrap();
    let options = SpillOptions { folder: folder.path().to_path_buf(), bytes: FILE_ALIGNMENT, verify: true };
    let file = bench.device.spill_file(&options).unwrap().part(0..FILE_ALIGNMENT).unwrap();
    let host = bench.device.host_buffer(FILE_ALIGNMENT, "gradients").unwrap();
    host.all().write(|bytes| bytes.fill(0)).unwrap();
    let files = bench.device.stream("files");
    files.submit(Op::WriteFile { input: host.all(), file: file.clone() }).unwrap();
    bench.device.synchronize().unwrap();
    damage(folder.path());
    files.submit(Op::ReadFile { file, out: host.all() }).unwrap();
    let bytes = gradients.len() * f32::DTYPE.size_bytes();
    assert_eq!(gradients.dtype(), DType::F32);
    bench.run(Op::CopyIn { input: host.part(0..bytes).unwrap(), out: gradients });
}

/// Writes over the nameless file of a folder: this process has it open.
fn damage(folder: &Path) {
    let open = std::fs::read_dir("/proc/self/fd").unwrap().map(|entry| entry.unwrap().path());
    let own = |path: &Path| std::fs::read_link(path).is_ok_and(|target| target.starts_with(folder));
    let file = open.into_iter().find(|path| own(path)).expect("the spill file is open");
    let file = OpenOptions::new().write(true).open(file).unwrap();
    file.write_all_at(&[1], 100).unwrap();
    file.sync_all().unwrap();
}
