//! What a training loop gets: every window of an epoch once, in the sampler's order, from any position.

use std::fs::{self, OpenOptions};

use ebbtide_loader::{Error, PrefetchOptions, Prefetcher, Sampler, TokenBatch, TokenFile, Windows};
use proptest::prelude::*;
use tempfile::{TempDir, tempdir};

/// A sampler over a file of the tokens 0, 1, 2, …, so that a window's first token says which it is.
fn sampler(tokens: u16, context: usize, seed: u64) -> (TempDir, Sampler) {
    let folder = tempdir().unwrap();
    let path = folder.path().join("tokens.bin");
    fs::write(&path, (0..tokens).flat_map(u16::to_le_bytes).collect::<Vec<u8>>()).unwrap();
    let file = TokenFile::open(path).unwrap();
    (folder, Sampler::new(Windows::new(&file, 0..file.len(), context).unwrap(), seed))
}

/// The windows that the samples of a batch are.
fn windows(batch: &TokenBatch) -> Vec<u64> {
    let context = batch.context;
    let samples = batch.tokens.chunks_exact(context).zip(batch.targets.chunks_exact(context));
    samples
        .map(|(inputs, targets)| {
            for (i, (&input, &target)) in inputs.iter().zip(targets).enumerate() {
                assert_eq!((input, target as u32), (inputs[0] + i as u32, input + 1));
            }
            u64::from(inputs[0]) / context as u64
        })
        .collect()
}

fn prefetcher(sampler: &Sampler, batch: usize, position: u64, batches: usize) -> Prefetcher {
    let options = PrefetchOptions { batches, ..Default::default() };
    Prefetcher::new(sampler.clone(), batch, position, options).unwrap()
}

proptest! {
    // Each case starts a thread and writes a file.
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn batches_follow_the_sampler(
        tokens in 10u16..500,
        context in 1usize..9,
        batch in 1usize..40,
        batches in 0usize..6,
        bytes in 0usize..4000,
        position in 0u64..2000,
        seed: u64,
        recycle: bool,
    ) {
        let (_folder, sampler) = sampler(tokens, context, seed);
        let options = PrefetchOptions { batches, bytes };
        let mut prefetcher = Prefetcher::new(sampler.clone(), batch, position, options).unwrap();
        let mut at = position;
        for _ in 0..12 {
            let delivered = prefetcher.next().unwrap();
            let expected: Vec<_> = (at..at + batch as u64).map(|sample| sampler.window_at(sample)).collect();
            prop_assert_eq!(windows(&delivered), expected);
            at += batch as u64;
            prop_assert_eq!((delivered.batch, delivered.context, delivered.position), (batch, context, at));
            if recycle {
                prefetcher.recycle(delivered);
            }
        }
    }
}

#[test]
fn an_epoch_delivers_every_window_once() {
    // 57 windows, so no batch but the last of 19 epochs ends with an epoch.
    let (_folder, sampler) = sampler(57 * 4 + 1, 4, 3);
    let mut prefetcher = prefetcher(&sampler, 19 * 3 - 1, 0, 4);
    let delivered: Vec<u64> = (0..57).flat_map(|_| windows(&prefetcher.next().unwrap())).collect();
    let epochs: Vec<&[u64]> = delivered.chunks_exact(57).collect();
    assert_eq!(epochs.len(), 56);
    for epoch in &epochs {
        let mut sorted = epoch.to_vec();
        sorted.sort_unstable();
        assert!(sorted.into_iter().eq(0..57));
    }
    assert!(epochs.windows(2).all(|pair| pair[0] != pair[1]), "each epoch has an order of its own");
    assert_eq!([0, 56, 57, 57 * 56].map(|sample| sampler.epoch_at(sample)), [0, 0, 1, 56]);
}

#[test]
fn a_resumed_run_gets_the_rest() {
    let (_folder, sampler) = sampler(101, 3, 5);
    let mut whole = prefetcher(&sampler, 7, 0, 3);
    let batches: Vec<TokenBatch> = (0..15).map(|_| whole.next().unwrap()).collect();
    for (done, last) in batches.iter().enumerate() {
        let mut resumed = prefetcher(&sampler, 7, last.position, 2);
        for batch in &batches[done + 1..] {
            assert_eq!(&resumed.next().unwrap(), batch);
        }
    }
}

#[test]
fn the_order_hangs_on_the_seed_and_the_content() {
    let order = |sampler: &Sampler| -> Vec<u64> { (0..50).map(|sample| sampler.window_at(sample)).collect() };
    let (_a, first) = sampler(201, 4, 1);
    let (_b, same) = sampler(201, 4, 1);
    let (_c, other_seed) = sampler(201, 4, 2);
    let (_d, other_content) = sampler(202, 4, 1);
    assert_eq!(first.windows().count(), other_content.windows().count());
    assert_eq!(order(&first), order(&same));
    assert_ne!(order(&first), order(&other_seed));
    assert_ne!(order(&first), order(&other_content));
}

#[test]
fn a_file_cut_short_while_in_use_is_an_error_that_stays() {
    let (_folder, sampler) = sampler(60_001, 100, 1);
    let mut prefetcher = prefetcher(&sampler, 4, 0, 2);
    prefetcher.next().unwrap();
    let path = sampler.windows().file().path();
    OpenOptions::new().write(true).open(path).unwrap().set_len(20).unwrap();
    // What was read before may still come.
    let error = (0..4).find_map(|_| prefetcher.next().err()).unwrap();
    let Error::CutShort { path: named, offset, expected: 202, .. } = &error else { panic!("{error}") };
    assert_eq!((&**named, offset % 200), (path, 0));
    assert_eq!(prefetcher.next().unwrap_err().to_string(), error.to_string());
}

#[test]
fn batches_and_positions_that_cannot_be() {
    let (_folder, sampler) = sampler(101, 3, 5);
    let start =
        |batch, position| Prefetcher::new(sampler.clone(), batch, position, PrefetchOptions::default());
    for batch in [0, usize::MAX, usize::MAX / 24 + 1] {
        let error = start(batch, 0).unwrap_err();
        assert!(matches!(error, Error::BadBatch { context: 3, .. }), "{error}");
    }
    // More than any machine has.
    assert!(matches!(start(usize::MAX / 32, 0).unwrap().next(), Err(Error::NoMemory { .. })));
    let mut last = start(5, u64::MAX - 7).unwrap();
    assert_eq!(last.next().unwrap().position, u64::MAX - 2);
    assert!(
        matches!(last.next(), Err(Error::BadPosition { position, batch: 5 }) if position == u64::MAX - 2)
    );
}

#[test]
fn dropped_at_any_time_it_ends() {
    let (_folder, sampler) = sampler(1001, 4, 1);
    for taken in 0..20 {
        let mut prefetcher = prefetcher(&sampler, 5, 0, taken % 4);
        for _ in 0..taken {
            prefetcher.next().unwrap();
        }
    }
    // In the midst of a batch of many samples.
    drop(prefetcher(&sampler, 1 << 20, 0, 1));
}

#[test]
fn it_works_inside_of_a_runtime() {
    let (_folder, sampler) = sampler(1001, 4, 1);
    let deliver = || async {
        let mut prefetcher = prefetcher(&sampler, 5, 0, 2);
        let first = prefetcher.next().unwrap();
        assert_eq!(windows(&first)[0], sampler.window_at(0));
        prefetcher.recycle(first);
        prefetcher.next().unwrap();
        drop(prefetcher);
    };
    tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(deliver());
    tokio::runtime::Builder::new_multi_thread().worker_threads(1).build().unwrap().block_on(deliver());
}

#[test]
fn waiting_is_counted() {
    let (_folder, sampler) = sampler(1001, 4, 1);
    let mut prefetcher = prefetcher(&sampler, 1 << 16, 0, 1);
    assert_eq!(prefetcher.wait_seconds(), 0.0);
    let began = std::time::Instant::now();
    for _ in 0..3 {
        prefetcher.next().unwrap();
    }
    let waited = prefetcher.wait_seconds();
    assert!(waited > 0.0 && waited <= began.elapsed().as_secs_f64(), "{waited}");
}
