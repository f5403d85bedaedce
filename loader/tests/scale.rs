//! What breaks loaders of data larger than memory, case by case.
#![cfg(unix)]

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Stdio};

use ebbtide_loader::{
    BlockOrder, Dataset, Encoding, Error, Format, Identity, IoMode, Loader, LoaderOptions, LoaderState,
    Order, Samples, Share, order_of,
};
use proptest::prelude::*;
use tempfile::{TempDir, tempdir};

/// A dataset of the `u32` tokens 0, 1, 2, …, so that a window's first token says which it is.
fn counting(folder: &Path, tokens: u32) -> Dataset {
    let path = folder.join("tokens.bin");
    if !path.exists() {
        fs::write(&path, (0..tokens).flat_map(u32::to_le_bytes).collect::<Vec<u8>>()).unwrap();
    }
    Dataset::open_as(path, Some(Format::Raw(Encoding::U32))).unwrap()
}

fn samples(windows: u32, context: usize) -> (TempDir, Samples) {
    let folder = tempdir().unwrap();
    let dataset = counting(folder.path(), windows * context as u32 + 1);
    let samples = dataset.samples(0..dataset.len(), context).unwrap();
    (folder, samples)
}

/// Blocks of 4 KiB, 12 of them open in four streams.
fn block(batch: usize) -> LoaderOptions {
    let order = Order::Block(BlockOrder { block_bytes: 4096, window_blocks: 12, streams: 4 });
    LoaderOptions { order, seed: 7, batch, ..LoaderOptions::default() }
}

/// The windows of the next `batches`, checked token by token.
fn take(loader: &mut Loader, batches: usize) -> Vec<u64> {
    let mut windows = Vec::new();
    for _ in 0..batches {
        let batch = loader.next().unwrap();
        for (inputs, targets) in
            batch.tokens.chunks_exact(batch.context).zip(batch.targets.chunks_exact(batch.context))
        {
            for (i, (&input, &target)) in inputs.iter().zip(targets).enumerate() {
                assert_eq!((input, target as u32), (inputs[0] + i as u32, input + 1));
            }
            assert_eq!(inputs[0] as usize % batch.context, 0);
            windows.push(u64::from(inputs[0]) / batch.context as u64);
        }
        loader.recycle(batch);
    }
    windows
}

fn at(position: u64) -> LoaderState {
    LoaderState { position, digest: 0 }
}

fn start(samples: &Samples, options: &LoaderOptions, position: u64) -> Loader {
    Loader::new(samples, options, at(position)).unwrap()
}

/// Cold, warm, and as the loader sees fit.
const MODES: [Option<IoMode>; 4] = [None, Some(IoMode::Direct), Some(IoMode::Dropped), Some(IoMode::Cached)];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn a_loader_delivers_its_order(
        windows in 1u32..3000,
        context in 1usize..40,
        batch in 1usize..50,
        block_bytes in 1u64..9000,
        window_blocks in 1u32..20,
        streams in 1u32..6,
        threads in 1usize..5,
        position in 0u64..9000,
        rank in 0u64..3,
        world in 3u64..5,
        mode in 0usize..4,
        seed: u64,
        random: bool,
    ) {
        let (_folder, samples) = samples(windows, context);
        let block = Order::Block(BlockOrder { block_bytes, window_blocks, streams });
        let options = LoaderOptions {
            order: if random { Order::Random } else { block },
            seed,
            batch,
            share: Share { rank, world },
            threads,
            batches_ahead: batch % 3,
            io: MODES[mode],
            ..LoaderOptions::default()
        };
        let mut loader = start(&samples, &options, position);
        let expected: Vec<u64> =
            order_of(&samples, &options, position).unwrap().take(8 * batch).map(|sample| sample.window).collect();
        prop_assert_eq!(take(&mut loader, 8), expected);
        prop_assert_eq!(loader.state().position, position + 8 * batch as u64 * world);
    }
}

/// The child of the test below: delivers batches and says what they were, until it is killed.
#[test]
fn child_that_is_killed() {
    let Some(folder) = std::env::var_os("EBBTIDE_KILLED_CHILD") else { return };
    let dataset = counting(Path::new(&folder), 0);
    let samples = dataset.samples(0..dataset.len(), 4).unwrap();
    let mut loader = start(&samples, &block(16), 0);
    let mut out = std::io::stdout().lock();
    loop {
        let windows = take(&mut loader, 1);
        let state = loader.state();
        // A parent that is gone ends it as well.
        if writeln!(out, "batch {} {} {windows:?}", state.position, state.digest).is_err() {
            return;
        }
    }
}

#[test]
fn exact_resume_after_kill() {
    let (folder, samples) = samples(4000, 4);
    let mut whole = start(&samples, &block(16), 0);
    // Epochs have 250 batches.
    for (saved, killed) in [(37, 53), (249, 251), (250, 263), (520, 521)] {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child_that_is_killed", "--nocapture"])
            .env("EBBTIDE_KILLED_CHILD", folder.path())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
        // The test runner's own lines come first, and may share one.
        let lines = lines.filter_map(|line| line.split_once("batch ").map(|(_, line)| line.to_owned()));
        let lines: Vec<String> = lines.take(killed).collect();
        child.kill().unwrap();
        child.wait().unwrap();
        let fields: Vec<&str> = lines[saved - 1].splitn(3, ' ').collect();
        let state = LoaderState { position: fields[0].parse().unwrap(), digest: fields[1].parse().unwrap() };
        let mut resumed = Loader::new(&samples, &block(16), state).unwrap();
        let mut unbroken = start(&samples, &block(16), 0);
        let first: String = (0..saved).map(|_| format!("{:?}\n", take(&mut unbroken, 1))).collect();
        let said: String =
            lines[..saved].iter().map(|line| line.splitn(3, ' ').nth(2).unwrap().to_owned() + "\n").collect();
        assert_eq!(said, first);
        assert_eq!(take(&mut resumed, 300), take(&mut unbroken, 300));
        assert_eq!(resumed.state(), unbroken.state());
    }
    // And in one process from twenty places of three epochs.
    let all = take(&mut whole, 800);
    for step in (3..760).step_by(38) {
        assert_eq!(
            take(&mut start(&samples, &block(16), 16 * step as u64), 20),
            all[16 * step..16 * (step + 20)]
        );
    }
}

#[test]
fn ranks_are_disjoint_and_together_everything() {
    let (_folder, samples) = samples(5000, 3);
    for options in [block(10), LoaderOptions { order: Order::Random, ..block(10) }] {
        // 5000 = 4 ranks * 10 * 125.
        let mut digest = 0u64;
        let mut seen: Vec<u64> = (0..4)
            .flat_map(|rank| {
                let options = LoaderOptions { share: Share { rank, world: 4 }, ..options.clone() };
                let mut loader = start(&samples, &options, 0);
                let windows = take(&mut loader, 125);
                digest = digest.wrapping_add(loader.state().digest);
                windows
            })
            .collect();
        seen.sort_unstable();
        assert!(seen.into_iter().eq(0..5000));
        let mut alone = start(&samples, &options, 0);
        take(&mut alone, 500);
        assert_eq!(alone.state(), LoaderState { position: 5000, digest });
    }
}

#[test]
fn nothing_is_lost_at_the_end_of_an_epoch_nor_by_resuming_again_and_again() {
    let (_folder, samples) = samples(1000, 5);
    // 1000 is no multiple of 48: batches run over the ends of epochs.
    let all = take(&mut start(&samples, &block(48), 0), 125);
    for epoch in all.chunks_exact(1000) {
        let mut epoch = epoch.to_vec();
        epoch.sort_unstable();
        assert!(epoch.into_iter().eq(0..1000));
    }
    let mut state = at(0);
    let mut windows = Vec::new();
    for batches in [0, 1, 19, 1, 0, 1, 20, 41, 42] {
        let mut loader = Loader::new(&samples, &block(48), state).unwrap();
        windows.extend(take(&mut loader, batches));
        state = loader.state();
    }
    assert_eq!(windows, all);
    let mut unbroken = start(&samples, &block(48), 0);
    take(&mut unbroken, 125);
    assert_eq!(state, unbroken.state());
    // Exactly at the end, and at the last sample.
    for from in [1000, 999, 2000] {
        assert_eq!(take(&mut start(&samples, &block(1), from), 5), all[from as usize..from as usize + 5]);
    }
}

#[test]
fn ranks_and_threads_and_batches_may_change() {
    let (_folder, samples) = samples(3000, 4);
    let mut whole = start(&samples, &block(24), 0);
    let all = take(&mut whole, 300);
    let mut state = at(0);
    // The same 24 samples a step of all ranks, then other batches.
    for (steps, world, batch, threads) in
        [(31, 1, 24, 1), (57, 2, 12, 3), (44, 4, 6, 4), (12, 3, 8, 1), (156, 1, 24, 2)]
    {
        let from = state.position as usize;
        let mut slices = vec![Vec::new(); steps * batch * world];
        let mut digest = state.digest;
        for rank in 0..world {
            let share = Share { rank: rank as u64, world: world as u64 };
            let options = LoaderOptions { share, threads, ..block(batch) };
            let mut loader = start(&samples, &options, state.position);
            for (turn, window) in take(&mut loader, steps).into_iter().enumerate() {
                // The rank's samples are those at positions that leave its number.
                let first = (rank + world - from % world) % world;
                slices[first + turn * world].push(window);
            }
            digest = digest.wrapping_add(loader.state().digest);
        }
        assert!(slices.concat().into_iter().eq(all[from..from + slices.len()].iter().copied()));
        state = LoaderState { position: (from + slices.len()) as u64, digest };
    }
    assert_eq!(state, whole.state());
}

#[test]
fn changed_data_is_refused_by_name() {
    let folder = tempdir().unwrap();
    let write = |name: &str, seed: u16| {
        let tokens: Vec<u8> = (0..5000u16).flat_map(|i| (i.wrapping_mul(31) ^ seed).to_le_bytes()).collect();
        fs::write(folder.path().join(name), tokens).unwrap();
    };
    ["a.bin", "b.bin", "c.bin"].iter().for_each(|name| write(name, 1));
    let identity = Dataset::open(folder.path()).unwrap().identity();
    let check = |identity: &Identity| match Dataset::open(folder.path()).unwrap().check_identity(identity) {
        Err(Error::Changed { path, what, .. }) => {
            Some(format!("{}: {what}", path.file_name().unwrap_or_default().to_string_lossy()))
        }
        other => other.map(|()| None).unwrap(),
    };
    assert_eq!(check(&identity), None);
    // Touched: still the same data.
    File::options()
        .write(true)
        .open(folder.path().join("b.bin"))
        .unwrap()
        .set_modified(std::time::UNIX_EPOCH)
        .unwrap();
    assert_eq!(check(&identity), None);
    // Replaced by data of the same length.
    write("b.bin", 2);
    assert_eq!(check(&identity).unwrap(), "b.bin: the fingerprint");
    write("b.bin", 1);
    // Longer.
    let mut longer = OpenOptions::new().append(true).open(folder.path().join("c.bin")).unwrap();
    longer.write_all(&[0, 0]).unwrap();
    assert_eq!(check(&identity).unwrap(), "c.bin: a length in bytes of");
    write("c.bin", 1);
    // One more, one fewer, another name.
    write("d.bin", 1);
    assert!(check(&identity).unwrap().ends_with(": files to be"));
    fs::remove_file(folder.path().join("d.bin")).unwrap();
    fs::rename(folder.path().join("a.bin"), folder.path().join("aa.bin")).unwrap();
    assert_eq!(check(&identity).unwrap(), "aa.bin: a file of the name");
    // Who accepts the change goes on in the order that was.
    let changed = Dataset::open(folder.path()).unwrap();
    let order = |dataset: &Dataset, fingerprint| -> Vec<u64> {
        let samples = dataset.samples(0..15_000, 4).unwrap();
        let options = LoaderOptions { fingerprint, ..block(4) };
        order_of(&samples, &options, 0).unwrap().take(50).map(|sample| sample.window).collect()
    };
    let saved = changed.fingerprint();
    let before = order(&changed, None);
    write("c.bin", 3);
    let changed = Dataset::open(folder.path()).unwrap();
    assert_ne!(order(&changed, None), before);
    assert_eq!(order(&changed, Some(saved)), before);
}

#[test]
fn a_memory_contract_is_kept() {
    // Eight times the limit and more: 8 MiB of data.
    let (_folder, samples) = samples(65_536, 32);
    let digest = |ram: u64, threads: usize, io: Option<IoMode>| {
        let order = Order::Block(BlockOrder { block_bytes: 16 << 10, window_blocks: 32, streams: 4 });
        let options = LoaderOptions { order, ram_bytes: Some(ram), threads, io, ..block(64) };
        let mut loader = start(&samples, &options, 0);
        take(&mut loader, 2 * 1024);
        let report = loader.report();
        assert!(report.arena_bytes + report.batch_bytes <= ram, "{report:?}");
        assert!(report.peak_arena_bytes <= report.arena_bytes);
        // Readers may be ahead of the two epochs by the arena.
        let read = (report.read_bytes - report.arena_bytes.min(report.read_bytes)) as f64;
        assert!(read <= report.gathered_bytes as f64 * 1.55, "{report:?}");
        (loader.state(), report)
    };
    // The order is the same in any memory, with any threads and any reads.
    let (first, small) = digest(1 << 20, 1, Some(IoMode::Direct));
    for (ram, threads, io) in [(1 << 20, 4, None), (4 << 20, 2, Some(IoMode::Dropped)), (64 << 20, 3, None)] {
        assert_eq!(digest(ram, threads, io).0, first);
    }
    // Data that does not fit is read past the page cache unless that cannot be, and the report says why.
    let (_, report) = digest(1 << 20, 2, None);
    assert!(report.io == "direct" || report.io_reason.contains("direct"), "{report:?}");
    let (_, report) = digest(64 << 20, 2, None);
    assert_eq!(report.io, "cached");
    assert!(small.limit_source == "as asked for");
    // What cannot be kept is refused, and says what would do.
    let options = LoaderOptions { ram_bytes: Some(10_000), ..block(64) };
    let Err(Error::MemoryTooSmall { needed, blocks: 13, limit: 10_000, .. }) =
        Loader::new(&samples, &options, at(0))
    else {
        panic!("too little memory is refused")
    };
    let enough = LoaderOptions { ram_bytes: Some(needed), ..block(64) };
    let mut loader = start(&samples, &enough, 0);
    take(&mut loader, 3000);
    assert_eq!(loader.report().arena_bytes + loader.report().batch_bytes, needed);
    let short = LoaderOptions { ram_bytes: Some(needed - 1), ..block(64) };
    assert!(matches!(Loader::new(&samples, &short, at(0)), Err(Error::MemoryTooSmall { .. })));
}

#[test]
fn the_least_memory_is_enough() {
    // Slots are handed over many at a time, and there are none to spare.
    let (_folder, samples) = samples(20_000, 8);
    for (streams, batch) in [(1, 1), (1, 7), (8, 3), (64, 64)] {
        let order = Order::Block(BlockOrder { block_bytes: 2048, window_blocks: 64, streams });
        let options = LoaderOptions { order, threads: 1, batches_ahead: 1, ..block(batch) };
        let starved = LoaderOptions { ram_bytes: Some(1), ..options.clone() };
        let Err(Error::MemoryTooSmall { needed, .. }) = Loader::new(&samples, &starved, at(0)) else {
            panic!("a byte is too little")
        };
        let least = LoaderOptions { ram_bytes: Some(needed), ..options.clone() };
        let batches = 25_000 / batch;
        let expected: Vec<u64> = order_of(&samples, &options, 0)
            .unwrap()
            .take(batches * batch)
            .map(|sample| sample.window)
            .collect();
        assert_eq!(take(&mut start(&samples, &least, 0), batches), expected);
    }
}

#[test]
fn the_digest_is_of_bytes_and_positions() {
    let (folder, samples) = samples(300, 8);
    let bytes = fs::read(folder.path().join("tokens.bin")).unwrap();
    for seed in [1, 2] {
        let options = LoaderOptions { seed, ..block(10) };
        let digest = order_of(&samples, &options, 0).unwrap().take(350).fold(0u64, |digest, sample| {
            let window = &bytes[sample.window as usize * 32..][..36];
            digest.wrapping_add(xxhash_rust::xxh3::xxh3_64_with_seed(window, sample.position))
        });
        let mut loader = start(&samples, &options, 0);
        take(&mut loader, 35);
        assert_eq!(loader.state(), LoaderState { position: 350, digest });
    }
}

#[test]
fn whole_blocks_are_read_once_an_epoch() {
    // Blocks of 256 KiB on 4 MiB, and a header that no page begins after.
    let (_folder, samples) = samples(32_768, 32);
    let order = Order::Block(BlockOrder { block_bytes: 256 << 10, window_blocks: 4, streams: 1 });
    let options = LoaderOptions { order, ram_bytes: Some(3 << 20), threads: 2, ..block(32) };
    let mut loader = start(&samples, &options, 0);
    take(&mut loader, 1024);
    assert!(loader.report().read_amplification <= 1.05, "{:?}", loader.report());
}

#[test]
fn sizes_at_the_edges() {
    let folder = tempdir().unwrap();
    // A sparse file of 5 GiB with a few tokens beyond what 32 bits count.
    let path = folder.path().join("sparse.bin");
    let file = File::create(&path).unwrap();
    file.set_len(5 << 30).unwrap();
    let marks = [(1u64 << 31) + 2048, (1 << 32) - 2048, (1 << 32) + 2048, (5 << 30) - 4096];
    for (mark, offset) in marks.into_iter().enumerate() {
        file.write_all_at(&(mark as u16 + 1).to_le_bytes(), offset).unwrap();
    }
    let dataset = Dataset::open(&path).unwrap();
    let samples = dataset.samples(0..dataset.len(), 1024).unwrap();
    assert_eq!(samples.count(), (5 << 30) / 2048 - 1);
    for (mark, offset) in marks.into_iter().enumerate() {
        let window = offset / 2048;
        if window == samples.count() {
            continue;
        }
        let mut inputs = vec![0; 1024];
        samples.read(window, &mut inputs, &mut vec![0; 1024]).unwrap();
        assert_eq!(inputs[(offset % 2048 / 2) as usize], mark as u32 + 1);
        // And through the loader, at the position where the order has it.
        let options = LoaderOptions { ram_bytes: Some(64 << 20), order: Order::Random, ..block(1) };
        let position = permutation_of(&samples, &options, window);
        let batch = start(&samples, &options, position).next().unwrap();
        assert_eq!(batch.tokens, inputs);
    }
    drop(dataset);

    // T, T + 1 and T + 2 tokens.
    for (tokens, windows) in [(8, None), (9, Some(1)), (10, Some(1)), (17, Some(2))] {
        let folder = tempdir().unwrap();
        let dataset = counting(folder.path(), tokens);
        let samples = dataset.samples(0..dataset.len(), 8);
        assert_eq!(samples.as_ref().ok().map(Samples::count), windows);
        if let Ok(samples) = samples {
            take(&mut start(&samples, &block(3), 0), 4);
        }
    }
    let empty = folder.path().join("empty.bin");
    fs::write(&empty, []).unwrap();
    assert!(matches!(Dataset::open(empty), Err(Error::Empty { .. })));
    assert!(matches!(counting(folder.path(), 9).samples(0..9, 0), Err(Error::BadContext { .. })));
}

/// The position in the first epoch of a window in random order.
fn permutation_of(samples: &Samples, options: &LoaderOptions, window: u64) -> u64 {
    let fingerprint = samples.dataset().fingerprint();
    ebbtide_loader::Permutation::new(samples.count(), options.seed, 0, fingerprint).inverse(window)
}

/// Takes batches until the error.
fn error_of(mut loader: Loader) -> Error {
    let error = (0..100_000).find_map(|_| loader.next().err()).expect("an error");
    assert_eq!(loader.next().unwrap_err().to_string(), error.to_string(), "the error stays");
    error
}

#[test]
fn damage_of_every_kind_is_an_error_that_names_it() {
    let fresh = |mode: Option<IoMode>| {
        let (folder, samples) = samples(20_000, 8);
        let path = folder.path().join("tokens.bin");
        let options = LoaderOptions { io: mode, ram_bytes: Some(200_000), ..block(4) };
        let mut loader = start(&samples, &options, 0);
        take(&mut loader, 3);
        (folder, path, loader, samples, options)
    };
    for mode in MODES {
        // Cut while it is read: by one token, in the middle, to nothing.
        for left in [640_000, 300_001, 0] {
            let (_folder, path, loader, ..) = fresh(mode);
            OpenOptions::new().write(true).open(&path).unwrap().set_len(left).unwrap();
            match error_of(loader) {
                Error::CutShort { path: named, offset, expected, found } => {
                    assert_eq!(named, path);
                    assert!(
                        offset + found <= left.max(offset) && found < expected,
                        "{offset} {expected} {found}"
                    );
                }
                Error::Changed { path: named, what: "a length in bytes of", .. } => assert_eq!(named, path),
                other => panic!("{other}"),
            }
        }
        // Cut and filled up with zeros.
        let (_folder, path, loader, ..) = fresh(mode);
        let file = OpenOptions::new().write(true).open(&path).unwrap();
        file.set_len(0).unwrap();
        file.set_len(640_004).unwrap();
        file.set_modified(std::time::UNIX_EPOCH).unwrap();
        assert!(matches!(error_of(loader), Error::Changed { .. } | Error::CutShort { .. }));
        // Replaced by another file, and removed.
        let (folder, path, loader, ..) = fresh(mode);
        fs::write(folder.path().join("other"), fs::read(&path).unwrap()).unwrap();
        fs::rename(folder.path().join("other"), &path).unwrap();
        assert!(matches!(error_of(loader), Error::Changed { what: "to find", .. }));
        let (folder, _path, loader, ..) = fresh(mode);
        folder.close().unwrap();
        assert!(matches!(error_of(loader), Error::Changed { what: "to find", .. }));
        // Touched: nothing happened to the data.
        let (_folder, path, mut loader, samples, options) = fresh(mode);
        File::options().write(true).open(&path).unwrap().set_modified(std::time::UNIX_EPOCH).unwrap();
        let rest = take(&mut loader, 5000);
        // And a loader that is started again at once.
        drop(loader);
        assert_eq!(take(&mut start(&samples, &options, 12), 5000), rest);
    }
    // A number that is no token, or none of the vocabulary.
    let (_folder, samples) = samples(1000, 8);
    let options = LoaderOptions { vocabulary: Some(4001), ..block(4) };
    let Error::NotAToken { index, offset, value, limit: 4001, .. } = error_of(start(&samples, &options, 0))
    else {
        panic!("a token outside of the vocabulary")
    };
    assert!(index == 4 * offset / 16 && value >= 4001 && index == value as u64);
}

#[test]
fn a_loader_works_inside_of_a_runtime_and_ends_when_dropped() {
    let (_folder, samples) = samples(2000, 8);
    let deliver = || async {
        let mut loader = start(&samples, &block(5), 0);
        take(&mut loader, 3);
    };
    tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(deliver());
    tokio::runtime::Builder::new_multi_thread().worker_threads(1).build().unwrap().block_on(deliver());
    for taken in 0..20 {
        take(&mut start(&samples, &block(1 + 100 * (taken % 3)), 0), taken);
    }
}

#[test]
fn options_that_cannot_be() {
    let (_folder, samples) = samples(10, 4);
    let start = |options: LoaderOptions, position| Loader::new(&samples, &options, at(position));
    let order = |block_bytes, window_blocks, streams| {
        let order = Order::Block(BlockOrder { block_bytes, window_blocks, streams });
        start(LoaderOptions { order, ..block(1) }, 0)
    };
    assert!(matches!(order(0, 1, 1), Err(Error::BadOrder { what: "bytes of a block", .. })));
    assert!(matches!(order(1, 0, 1), Err(Error::BadOrder { what: "blocks of the window", .. })));
    assert!(matches!(order(1, 1, 1 << 17), Err(Error::BadOrder { what: "streams", .. })));
    let share = Share { rank: 2, world: 2 };
    assert!(matches!(
        start(LoaderOptions { share, ..block(1) }, 0),
        Err(Error::BadShare { rank: 2, world: 2 })
    ));
    for batch in [0, usize::MAX, usize::MAX / 24] {
        assert!(matches!(start(block(batch), 0), Err(Error::BadBatch { .. })));
    }
    // Positions end with the last epoch that fits.
    let mut last = start(block(5), u64::MAX / 10 * 10 - 5).unwrap();
    assert_eq!(last.next().unwrap().position, u64::MAX / 10 * 10);
    assert!(matches!(last.next(), Err(Error::BadPosition { .. })));
    let seen: BTreeMap<u64, u64> = order_of(&samples, &block(1), 0)
        .unwrap()
        .take(10)
        .map(|sample| (sample.window, sample.position))
        .collect();
    assert_eq!(seen.len(), 10);
}
