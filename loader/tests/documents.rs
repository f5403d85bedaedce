//! Windows of documents: every pair of an input and its target once an epoch, none across documents, from any position.

use std::fs;
use std::path::Path;

use ebbtide_loader::{
    BlockOrder, Boundary, Dataset, DocumentBatch, DocumentLoader, DocumentState, Documents, Error,
    LoaderOptions, Order, Packing, Share, TokenWriter,
};
use proptest::prelude::*;
use tempfile::{TempDir, tempdir};

const SEPARATOR: u16 = 0;

/// Documents of these lengths with their separator, whose other tokens all differ.
fn tokens(lengths: &[usize], boundary: Boundary) -> Vec<u16> {
    let mut next = 1u16..;
    let document = |&length: &usize| {
        let mut tokens: Vec<u16> = next.by_ref().take(length - 1).collect();
        let at = if matches!(boundary, Boundary::Begins(_)) { 0 } else { tokens.len() };
        tokens.insert(at, SEPARATOR);
        tokens
    };
    lengths.iter().flat_map(document).collect()
}

fn write(path: &Path, tokens: &[u16]) {
    let mut writer = TokenWriter::create(path).unwrap();
    writer.write(tokens).unwrap();
    writer.finish().unwrap();
}

fn dataset(tokens: &[u16]) -> (TempDir, Dataset) {
    let folder = tempdir().unwrap();
    let path = folder.path().join("t.bin");
    write(&path, tokens);
    let dataset = Dataset::open(path).unwrap();
    (folder, dataset)
}

fn options(batch: usize, block_bytes: u64, window_blocks: u32) -> LoaderOptions {
    let order = Order::Block(BlockOrder { block_bytes, window_blocks, streams: 1 });
    LoaderOptions { order, seed: 5, batch, ram_bytes: Some(64 << 20), ..LoaderOptions::default() }
}

/// The segments of a batch, but padding, as pairs of an input and its target. Padding is held to what it should be.
fn segments(batch: &DocumentBatch) -> Vec<Vec<(u32, i32)>> {
    let context = batch.batch.context;
    assert_eq!(batch.batch.tokens.len(), batch.batch.batch * context);
    assert_eq!(batch.cu_seqlens.last(), Some(&(batch.batch.tokens.len() as u32)));
    let mut segments = Vec::new();
    for ends in batch.cu_seqlens.windows(2) {
        let (start, end) = (ends[0] as usize, ends[1] as usize);
        let window = start / context;
        assert!(start < end && end <= (window + 1) * context, "a segment lies in one window");
        let (inputs, targets) = (&batch.batch.tokens[start..end], &batch.batch.targets[start..end]);
        if start - window * context < batch.valid[window] as usize {
            segments.push(inputs.iter().copied().zip(targets.iter().copied()).collect());
        } else {
            assert!(inputs.iter().all(|&input| input == 0) && targets.iter().all(|&target| target == -100));
        }
    }
    segments
}

/// The batches of one window each, up to the end of the first epoch.
fn epoch(documents: &Documents, packing: Packing, options: &LoaderOptions) -> Vec<DocumentBatch> {
    let options = LoaderOptions { batch: 1, ..options.clone() };
    let mut loader = DocumentLoader::new(documents, packing, &options, DocumentState::default()).unwrap();
    let mut batches = Vec::new();
    loop {
        let batch = loader.next().unwrap();
        if loader.state().epoch > 0 {
            return batches;
        }
        batches.push(batch);
    }
}

fn packings() -> impl Strategy<Value = Packing> {
    prop_oneof![Just(Packing::Padded), (1u32..9).prop_map(Packing::FirstFit)]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn each_pair_comes_once_an_epoch_and_none_crosses_documents(
        lengths in prop::collection::vec(1usize..40, 1..80),
        context in 1usize..24,
        block_bytes in 1u64..200,
        window_blocks in 1u32..6,
        packing in packings(),
        begins: bool,
    ) {
        prop_assume!(lengths.iter().any(|&length| length > 1));
        let boundary = if begins { Boundary::Begins(0) } else { Boundary::Ends(0) };
        let tokens = tokens(&lengths, boundary);
        let (_folder, dataset) = dataset(&tokens);
        let documents = Documents::new(&dataset, 0..dataset.len(), context, boundary).unwrap();
        let batches = epoch(&documents, packing, &options(1, block_bytes, window_blocks));
        let delivered: Vec<_> = batches.iter().flat_map(segments).collect();

        let mut expected = Vec::new();
        let mut first = 0;
        for &length in &lengths {
            let document = &tokens[first..first + length];
            expected.extend(document.windows(2).map(|pair| (u32::from(pair[0]), i32::from(pair[1]))));
            // What fits a window is not cut, wherever blocks end.
            if (2..=context + 1).contains(&length) {
                let whole: Vec<_> =
                    document.windows(2).map(|pair| (u32::from(pair[0]), i32::from(pair[1]))).collect();
                prop_assert!(delivered.contains(&whole), "{:?}", whole);
            }
            first += length;
        }
        let mut pairs: Vec<_> = delivered.into_iter().flatten().collect();
        pairs.sort_unstable();
        expected.sort_unstable();
        prop_assert_eq!(pairs, expected);
        if packing == Packing::Padded {
            prop_assert!(batches.iter().all(|batch| segments(batch).len() == 1));
        }
    }

    #[test]
    fn packing_resumes_in_the_middle(
        lengths in prop::collection::vec(2usize..40, 1..80),
        context in 2usize..24,
        (block_bytes, window_blocks) in (1u64..200, 1u32..6),
        packing in packings(),
        stops in prop::collection::vec(1usize..30, 1..5),
        batch in 1usize..5,
        ahead in 1usize..5,
    ) {
        let tokens = tokens(&lengths, Boundary::Ends(0));
        let (_folder, dataset) = dataset(&tokens);
        let documents = Documents::new(&dataset, 0..dataset.len(), context, Boundary::Ends(0)).unwrap();
        let options = options(batch, block_bytes, window_blocks);
        let start = |ahead, state| {
            let options = LoaderOptions { batches_ahead: ahead, ..options.clone() };
            DocumentLoader::new(&documents, packing, &options, state).unwrap()
        };
        let mut whole = start(4, DocumentState::default());
        let mut state = DocumentState::default();
        for stop in stops {
            let mut resumed = start(ahead, state);
            for _ in 0..stop {
                prop_assert_eq!(resumed.next().unwrap(), whole.next().unwrap());
            }
            state = resumed.state();
            prop_assert_eq!(state, whole.state());
        }
    }
}

#[test]
fn ranks_share_the_windows_out() {
    let lengths: Vec<usize> = (0..90).map(|index| 2 + index * 7 % 23).collect();
    let (_folder, dataset) = dataset(&tokens(&lengths, Boundary::Ends(0)));
    let documents = Documents::new(&dataset, 0..dataset.len(), 16, Boundary::Ends(0)).unwrap();
    let start = |batch, share, state| {
        let options = LoaderOptions { share, ..options(batch, 100, 3) };
        DocumentLoader::new(&documents, Packing::FirstFit(4), &options, state).unwrap()
    };
    let mut alone = start(12, Share::default(), DocumentState::default());
    let mut state = DocumentState::default();
    for world in [1, 2, 3, 4, 12, 1, 6, 2, 2, 4] {
        let whole = alone.next().unwrap();
        let windows: Vec<_> = whole.batch.tokens.chunks_exact(16).collect();
        let mut digest = state.digest;
        let mut after = state;
        for rank in 0..world {
            let began = DocumentState { digest: 0, ..state };
            let mut loader = start(12 / world as usize, Share { rank, world }, began);
            let batch = loader.next().unwrap();
            let own = windows.iter().skip(rank as usize).step_by(world as usize);
            assert!(batch.batch.tokens.chunks_exact(16).eq(own.copied()));
            after = loader.state();
            digest = digest.wrapping_add(after.digest);
        }
        state = DocumentState { digest, ..after };
        assert_eq!(state, alone.state());
    }
    assert!(state.epoch > 0, "the ranks went past an epoch's end");
}

#[test]
fn packing_fills_windows() {
    // 500 documents of 2 to 64 tokens, 33 on average, into windows of 128.
    let lengths: Vec<usize> = (0..500).map(|index| 2 + index * 37 % 63).collect();
    let (_folder, dataset) = dataset(&tokens(&lengths, Boundary::Ends(0)));
    let documents = Documents::new(&dataset, 0..dataset.len(), 128, Boundary::Ends(0)).unwrap();
    let filled = |packing| {
        let batches = epoch(&documents, packing, &options(1, 1 << 20, 64));
        let valid: u32 = batches.iter().map(|batch| batch.valid[0]).sum();
        f64::from(valid) / (128 * batches.len()) as f64
    };
    let (padded, packed) = (filled(Packing::Padded), filled(Packing::FirstFit(16)));
    // A window has one of 32 pairs on average; packed, a window is open until next to nothing fits.
    assert!(padded < 0.26 && packed > 0.97, "{padded} {packed}");
}

#[test]
fn an_index_tells_documents() {
    // Sequences of 3, 2, 4 and 1 tokens; the first two are a document, then there is an empty one, then one of each.
    let folder = tempdir().unwrap();
    let (lengths, ends) = ([3u32, 2, 4, 1], [0u64, 2, 2, 3, 4]);
    let mut index = b"MMIDIDX\0\0".to_vec();
    index.extend(1u64.to_le_bytes());
    index.push(8);
    index.extend((lengths.len() as u64).to_le_bytes());
    index.extend((ends.len() as u64).to_le_bytes());
    index.extend(lengths.iter().flat_map(|length| length.to_le_bytes()));
    index.extend([0u64, 6, 10, 18].iter().flat_map(|place| place.to_le_bytes()));
    index.extend(ends.iter().flat_map(|end| end.to_le_bytes()));
    fs::write(folder.path().join("t.idx"), index).unwrap();
    write(&folder.path().join("t.bin"), &(100..110).collect::<Vec<u16>>());
    let dataset = Dataset::open(folder.path().join("t.bin")).unwrap();
    for block_bytes in [1, 4, 12, 1 << 20] {
        let documents = Documents::new(&dataset, 0..dataset.len(), 4, Boundary::Index).unwrap();
        let batches = epoch(&documents, Packing::Padded, &options(1, block_bytes, 2));
        let mut inputs: Vec<Vec<u32>> = batches
            .iter()
            .flat_map(segments)
            .map(|segment| segment.into_iter().map(|(input, _)| input).collect())
            .collect();
        inputs.sort();
        assert_eq!(inputs, [vec![100, 101, 102, 103], vec![105, 106, 107]]);
    }
}

#[test]
fn validation_begins_with_a_document() {
    let lengths = [10, 10, 10, 10];
    let (_folder, dataset) = dataset(&tokens(&lengths, Boundary::Ends(0)));
    let split = |fraction| Documents::split(&dataset, fraction, 4, Boundary::Ends(0));
    for (fraction, training) in [(0.3, 30), (0.5, 20), (0.45, 30), (0.99, 10)] {
        let (first, second) = split(fraction).unwrap();
        assert_eq!((first.tokens(), second.unwrap().tokens()), (training, 40 - training));
    }
    assert!(split(0.0).unwrap().1.is_none());
    assert!(matches!(split(1.0), Err(Error::BadFraction { .. })));
    let error = split(0.1).unwrap_err().to_string();
    assert!(error.contains("at token 36 or after it"), "{error}");
}

#[test]
fn data_without_documents_is_an_error() {
    let (_folder, dataset) = dataset(&[SEPARATOR; 50]);
    let whole = 0..dataset.len();
    let error = Documents::new(&dataset, whole.clone(), 4, Boundary::Index).unwrap_err().to_string();
    assert!(error.contains("t.bin") && error.contains("index"), "{error}");
    let documents = Documents::new(&dataset, whole, 4, Boundary::Ends(0)).unwrap();
    let start = |options: &LoaderOptions, packing| {
        DocumentLoader::new(&documents, packing, options, DocumentState::default())
    };
    let mut loader = start(&options(1, 64, 2), Packing::Padded).unwrap();
    for _ in 0..2 {
        let error = loader.next().unwrap_err();
        assert!(matches!(error, Error::BadDocuments { .. }), "{error}");
    }
    let small = LoaderOptions { ram_bytes: Some(4096), ..options(1, 64, 2) };
    assert!(matches!(start(&small, Packing::Padded), Err(Error::MemoryTooSmall { limit: 4096, .. })));
    assert!(matches!(start(&options(0, 64, 2), Packing::Padded), Err(Error::BadBatch { .. })));
    assert!(matches!(start(&options(1, 64, 2), Packing::FirstFit(0)), Err(Error::BadOrder { .. })));
}
