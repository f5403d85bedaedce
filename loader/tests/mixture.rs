//! Mixtures: the proportions asked for, and every source's own order without a gap, from any position and on any ranks.

use std::path::Path;

use ebbtide_loader::{
    BlockOrder, Checksums, Dataset, Error, LoaderOptions, Mixture, MixtureLoader, MixtureState, Order, Share,
    Source, TokenWriter, order_of,
};
use proptest::prelude::*;
use tempfile::tempdir;

/// Up to five sources, not all of weight 0.
fn weights() -> impl Strategy<Value = Vec<u64>> {
    prop::collection::vec(0u64..60, 1..6)
        .prop_filter("a source", |weights| weights.iter().any(|&weight| weight > 0))
}

/// Changes of weights that keep all sources: positions in groups, and weights.
fn changes() -> impl Strategy<Value = Vec<(u64, Vec<u64>)>> {
    prop::collection::vec((1u64..200, weights()), 0..4)
}

fn mixture(seed: u64, first: &[u64], changes: &[(u64, Vec<u64>)], group: u64) -> Mixture {
    let mut mixture = Mixture::new(seed, first).unwrap().grouped(group).unwrap();
    let mut from = 0;
    for (steps, weights) in changes {
        from += steps * group;
        let mut weights = weights.clone();
        weights.resize(weights.len().max(mixture.sources()), 0);
        mixture.change(from, &weights).unwrap();
    }
    mixture
}

proptest! {
    #[test]
    fn a_source_never_strays_a_sample_from_its_weight(
        seed: u64, first in weights(), changes in changes(), group in 1u64..5,
    ) {
        let mixture = mixture(seed, &first, &changes, group);
        let phases: Vec<(u64, Vec<u64>)> =
            mixture.changes().map(|(from, weights)| (from, weights.to_vec())).collect();
        let (mut phase, mut since) = (0, vec![0u64; mixture.sources()]);
        for (n, draw) in (0u64..).zip(mixture.draws(0).take(1500)) {
            if phases.get(phase + 1).is_some_and(|next| next.0 == n) {
                phase += 1;
                since.fill(0);
            }
            since[draw.source] += 1;
            let (from, weights) = &phases[phase];
            let (steps, sum) = (n + 1 - from, weights.iter().sum::<u64>());
            for (source, &weight) in weights.iter().enumerate() {
                // |since - steps * weight / sum| < group, in whole numbers.
                let off = (since[source] * sum).abs_diff(steps * weight);
                prop_assert!(off < group * sum, "source {} of {:?} after {}: {:?}", source, weights, steps, since);
            }
        }
    }

    #[test]
    fn a_position_is_reached_without_walking(
        seed: u64, first in weights(), changes in changes(), group in 1u64..5, to in 0u64..1500,
    ) {
        let mixture = mixture(seed, &first, &changes, group);
        let mut counts = vec![0; mixture.sources()];
        for draw in mixture.draws(0).take(to as usize) {
            // The next of the source's own, from its first on.
            prop_assert_eq!(draw.sample, counts[draw.source]);
            counts[draw.source] += 1;
        }
        prop_assert_eq!(mixture.taken(to), counts);
        prop_assert!(mixture.draws(to).take(50).eq(mixture.draws(0).skip(to as usize).take(50)));
    }

    #[test]
    fn mixtures_draw_alike_up_to_where_they_part(
        seed: u64, first in weights(), early in changes(), late in changes(), other in changes(), add: bool,
    ) {
        let ours = mixture(seed, &first, &[early.clone(), late].concat(), 1);
        let mut theirs = mixture(seed, &first, &[early.clone(), other].concat(), 1);
        if add {
            let last = theirs.changes().last().unwrap().0;
            theirs.change(last + 1, &vec![1; theirs.sources() + 1]).unwrap();
        }
        let common = early.iter().map(|(steps, _)| steps).sum::<u64>();
        for position in [0, common, common + 1, common + 70, 2000] {
            let parts = ours.parts_before(&theirs, position);
            prop_assert_eq!(parts, theirs.parts_before(&ours, position));
            let alike = parts.unwrap_or(position);
            prop_assert!(alike <= position && parts.is_none_or(|parts| parts > common));
            prop_assert!(ours.draws(0).take(alike as usize).eq(theirs.draws(0).take(alike as usize)));
        }
        // Only proportions count.
        let tripled: Vec<_> = first.iter().map(|weight| 3 * weight).collect();
        prop_assert_eq!(ours.parts_before(&mixture(seed, &tripled, &early, 1), common), None);
        prop_assert_eq!(ours.parts_before(&mixture(!seed, &first, &early, 1), 1), Some(0));
        prop_assert_eq!(ours.parts_before(&ours.clone().grouped(1).unwrap(), u64::MAX), None);
    }

    #[test]
    fn a_mixture_is_the_same_once_written_down(seed: u64, first in weights(), changes in changes(), group in 1u64..5) {
        let mixture = mixture(seed, &first, &changes, group);
        let written = serde_json::to_string(&mixture).unwrap();
        prop_assert_eq!(serde_json::from_str::<Mixture>(&written).unwrap(), mixture);
    }
}

#[test]
fn weights_change_at_a_step_and_no_sample_is_lost() {
    // One to one, and from position 500 on two to one.
    let mut mixture = Mixture::new(7, &[1, 1]).unwrap();
    mixture.change(500, &[2, 1]).unwrap();
    let folder = tempdir().unwrap();
    let sources = [source(&folder.path().join("a"), 0, 300), source(&folder.path().join("b"), 300, 130)];
    let options = options(10, Share::default(), Order::Random);
    let mut loader = MixtureLoader::new(&mixture, &sources, &options, &MixtureState::default()).unwrap();
    let mut delivered = [Vec::new(), Vec::new()];
    for batch in 1..=200 {
        let filled = loader.next().unwrap();
        for (window, &source) in filled.batch.tokens.chunks_exact(CONTEXT).zip(&filled.sources) {
            delivered[source].push(u64::from(window[0]) / CONTEXT as u64);
        }
        // In halves up to 500, in thirds from there on.
        let (halves, thirds) = ((batch * 10).min(500) as f64, (batch * 10 - 500i32).max(0) as f64);
        let expected = halves / 2.0 + thirds * 2.0 / 3.0;
        assert!((delivered[0].len() as f64 - expected).abs() < 1.0);
        assert_eq!(loader.state().position, batch as u64 * 10);
        loader.recycle(filled);
    }
    for ((delivered, source), first) in delivered.iter().zip(&sources).zip([0, 300]) {
        let order = order_of(source.samples.as_ref().unwrap(), &options, 0).unwrap();
        let expected: Vec<_> = order.map(|sample| first + sample.window).take(delivered.len()).collect();
        assert_eq!(*delivered, expected);
    }
    assert_eq!(mixture.taken(2000), delivered.map(|delivered| delivered.len() as u64));
}

const CONTEXT: usize = 4;

/// A source of so many windows, the first of them number `first`: each token tells its place.
fn source(path: &Path, first: u16, windows: u16) -> Source {
    let (first, end) = (first * CONTEXT as u16, (first + windows) * CONTEXT as u16 + 1);
    let mut writer = TokenWriter::create(path).unwrap();
    writer.write(&(first..end).collect::<Vec<u16>>()).unwrap();
    writer.finish().unwrap();
    let dataset = Dataset::open(path).unwrap();
    Source::from(dataset.samples(0..dataset.len(), CONTEXT).unwrap())
}

fn options(batch: usize, share: Share, order: Order) -> LoaderOptions {
    LoaderOptions { order, seed: 3, batch, share, ram_bytes: Some(64 << 20), ..LoaderOptions::default() }
}

/// Takes batches of so many samples in all, and adds each sample's first token at its position.
fn deliver(
    mixture: &Mixture,
    sources: &[Source],
    (order, world, samples): (Order, u64, u64),
    state: &MixtureState,
    into: &mut Vec<u32>,
) -> MixtureState {
    let batch = samples / world;
    into.resize((state.position + samples) as usize, u32::MAX);
    let mut digests = vec![0u64; sources.len()];
    for rank in 0..world {
        // The sum of all ranks' digests is carried on by the first.
        let carried = if rank == 0 { state.digests.clone() } else { Vec::new() };
        let state = MixtureState { position: state.position, digests: carried };
        let options = options(batch as usize, Share { rank, world }, order);
        let mut loader = MixtureLoader::new(mixture, sources, &options, &state).unwrap();
        let filled = loader.next().unwrap();
        assert_eq!(filled.batch.batch, batch as usize);
        for (index, window) in (0..).zip(filled.batch.tokens.chunks_exact(CONTEXT)) {
            let first = state.position.next_multiple_of(world);
            let skipped = (rank + world - state.position % world) % world;
            assert!(first >= state.position);
            into[(state.position + skipped + index * world) as usize] = window[0];
        }
        let ended = loader.state();
        digests.iter_mut().zip(ended.digests).for_each(|(sum, digest)| *sum = sum.wrapping_add(digest));
    }
    MixtureState { position: state.position + samples, digests }
}

#[test]
fn ranks_may_change_while_a_mixture_goes_on() {
    let folder = tempdir().unwrap();
    let sources = [
        source(&folder.path().join("a"), 0, 90),
        source(&folder.path().join("b"), 90, 41),
        source(&folder.path().join("c"), 131, 17),
    ];
    let mut mixture = Mixture::new(11, &[3, 2]).unwrap().grouped(4).unwrap();
    mixture.change(48, &[1, 1, 1]).unwrap();
    let blocks = Order::Block(BlockOrder { block_bytes: 64, window_blocks: 4, streams: 2 });
    for order in [Order::Random, blocks] {
        let mut alone = Vec::new();
        let whole = deliver(&mixture, &sources, (order, 1, 240), &MixtureState::default(), &mut alone);
        let (mut shared, mut state) = (Vec::new(), MixtureState::default());
        // Some begin within a group.
        for (world, samples) in [(1, 6), (2, 30), (4, 60), (1, 21), (4, 44), (2, 78), (1, 1)] {
            state = deliver(&mixture, &sources, (order, world, samples), &state, &mut shared);
        }
        assert_eq!(shared, alone);
        assert_eq!(state, whole);
    }
}

#[test]
fn a_source_that_is_gone_need_not_be_there() {
    let folder = tempdir().unwrap();
    let b = source(&folder.path().join("b"), 0, 20);
    let mut mixture = Mixture::new(1, &[1, 1]).unwrap();
    mixture.change(10, &[0, 1]).unwrap();
    let sources = [Source { samples: None, fingerprint: None }, b];
    let options = options(4, Share::default(), Order::Random);
    let at = |position| MixtureState { position, digests: Vec::new() };
    let error = MixtureLoader::new(&mixture, &sources, &options, &at(9)).unwrap_err();
    assert!(error.to_string().contains("none for source 0"), "{error}");
    let mut loader = MixtureLoader::new(&mixture, &sources, &options, &at(10)).unwrap();
    assert_eq!(loader.next().unwrap().sources, [1; 4]);
}

#[test]
fn ending_puts_checksums_of_every_source_in_their_place() {
    let folder = tempdir().unwrap();
    let paths = ["a", "b"].map(|name| folder.path().join(name));
    let sources = [source(&paths[0], 0, 2000), source(&paths[1], 2000, 2000)];
    let mixture = Mixture::new(1, &[1, 1]).unwrap();
    let options =
        LoaderOptions { checksums: Checksums::Make(None), ..options(8, Share::default(), Order::Random) };
    let mut loader = MixtureLoader::new(&mixture, &sources, &options, &MixtureState::default()).unwrap();
    (0..4).for_each(|_| drop(loader.next().unwrap()));
    let state = loader.state();
    assert_eq!(loader.finish().unwrap(), state);
    assert!(["a.sums", "b.sums"].iter().all(|name| folder.path().join(name).exists()));
}

#[test]
fn weights_are_held_to_what_they_can_be() {
    assert_eq!(Mixture::weights(&["0.7", ".3", "2"]).unwrap(), [7, 3, 20]);
    for bad in ["", ".", "-1", "1e3", "0.1234567890123", "nan", "1.2.3"] {
        let error = Mixture::weights(&[bad]).unwrap_err();
        assert!(error.to_string().contains(&format!("found `{bad}`")), "{error}");
    }
    let refused = |result: Result<Mixture, Error>, what: &str| {
        let error = result.unwrap_err();
        assert!(matches!(error, Error::BadMixture { .. }) && error.to_string().contains(what), "{error}");
    };
    refused(Mixture::new(0, &[]), "sources");
    refused(Mixture::new(0, &[0, 0]), "above 0");
    refused(Mixture::new(0, &[1, 1 << 20]), "1048577");
    refused(Mixture::new(0, &[u64::MAX, u64::MAX - 1]), "a sum");
    // Weights count without their common divisor.
    assert_eq!(Mixture::new(0, &[u64::MAX, u64::MAX]).unwrap().taken(u64::MAX - 1), [u64::MAX / 2; 2]);
    let mixture = Mixture::new(0, &[1, 1]).unwrap();
    let change = |from, weights: &[u64]| {
        let mut mixture = mixture.clone().grouped(4).unwrap();
        mixture.change(8, &[1, 2]).unwrap();
        mixture.change(from, weights).map(|()| mixture)
    };
    refused(change(8, &[1, 2]), "after the last");
    refused(change(13, &[1, 2]), "multiple of the group");
    refused(change(12, &[1]), "has the weight 0");
    refused(mixture.clone().grouped(0), "group");
    assert!(change(12, &[0, 0, 1]).is_ok());
}

#[test]
fn the_finest_weights_are_walked_quickly() {
    // A period of 2^20 steps. Far in, a position is reached by one period's steps at most.
    let mixture = Mixture::new(5, &[(1 << 20) - 3, 2, 1]).unwrap();
    let position = 1_000_000_000_000_000_003;
    let taken = mixture.taken(position);
    assert_eq!(taken.iter().sum::<u64>(), position);
    let draw = mixture.draws(position).next().unwrap();
    assert_eq!(draw.sample, taken[draw.source]);
}

#[test]
fn an_error_comes_again_and_the_state_stays() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("a");
    let sources = [source(&path, 0, 40)];
    let mixture = Mixture::new(1, &[1]).unwrap();
    let options = LoaderOptions { vocabulary: Some(8), ..options(4, Share::default(), Order::Random) };
    let mut loader = MixtureLoader::new(&mixture, &sources, &options, &MixtureState::default()).unwrap();
    let before = loader.state();
    let error = loader.next().unwrap_err();
    assert!(matches!(error, Error::NotAToken { limit: 8, .. }), "{error}");
    assert_eq!(loader.next().unwrap_err().to_string(), error.to_string());
    assert_eq!(loader.state(), before);
}
