//! What an order does to sorted data, and to shuffled data.

use std::fs;

use ebbtide_loader::{BlockOrder, Dataset, LoaderOptions, Order, shuffle_report};
use tempfile::tempdir;

const CONTEXT: usize = 16;
const WINDOWS: usize = 20_000;

fn report(tokens: impl Iterator<Item = u16>, order: Order) -> ebbtide_loader::ShuffleReport {
    let folder = tempdir().unwrap();
    let path = folder.path().join("tokens.bin");
    fs::write(&path, tokens.flat_map(u16::to_le_bytes).collect::<Vec<u8>>()).unwrap();
    let dataset = Dataset::open(&path).unwrap();
    let samples = dataset.samples(0..dataset.len(), CONTEXT).unwrap();
    shuffle_report(&samples, &LoaderOptions { order, batch: 32, seed: 1, ..LoaderOptions::default() })
        .unwrap()
}

/// Ten sources one after another, each with tokens of its own.
fn sorted() -> impl Iterator<Item = u16> {
    let mut random = fastrand::Rng::with_seed(2);
    (0..WINDOWS * CONTEXT + 1).map(move |i| (i / (WINDOWS * CONTEXT / 10)) as u16 * 1000 + random.u16(..1000))
}

fn shuffled() -> impl Iterator<Item = u16> {
    let mut random = fastrand::Rng::with_seed(3);
    let sources: Vec<u16> = (0..=WINDOWS).map(|_| random.u16(..10)).collect();
    (0..WINDOWS * CONTEXT + 1).map(move |i| sources[i / CONTEXT] * 1000 + random.u16(..1000))
}

#[test]
fn sorted_data_is_warned_of_where_the_order_does_not_mix_it() {
    // 64 windows a block, 20 open: 1280 of 20,000 windows.
    let narrow = Order::Block(BlockOrder { block_bytes: 2048, window_blocks: 20, streams: 2 });
    let wide = Order::Block(BlockOrder { block_bytes: 2048, window_blocks: 300, streams: 2 });
    let found = report(sorted(), narrow);
    assert!(found.is_sorted() && found.runs < 60, "{found:?}");
    assert_eq!(found.window_samples, 1280);
    let warning = found.warning().unwrap();
    assert!(warning.contains("looks sorted") && warning.contains("mixes 6.4 % of it"), "{warning}");
    // A batch of 32 over 20 blocks meets 20 · (1 − (1 − 1/20)^32) = 16 of them.
    assert!((10.0..=20.0).contains(&found.blocks_in_batch), "{found:?}");
    assert_eq!(report(sorted(), wide).warning(), None);
    let random = report(sorted(), Order::Random);
    assert!(random.is_sorted() && random.warning().is_none() && random.window_samples == WINDOWS as u64);
    let found = report(shuffled(), narrow);
    assert!(!found.is_sorted() && found.warning().is_none(), "{found:?}");
}

#[test]
fn small_and_constant_data_says_nothing() {
    for count in [CONTEXT + 1, 5 * CONTEXT, 100 * CONTEXT] {
        let found = report((0..count).map(|_| 7), Order::Block(BlockOrder::default()));
        assert_eq!((found.runs_score, found.warning()), (0.0, None));
        assert!(found.blocks_in_batch >= 1.0 && found.most_blocks_in_batch >= 1);
    }
}
