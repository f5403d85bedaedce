//! Checksums of pages: made as data is read, verified after, and what is done about damage; packed files, which have their own.

use std::fs::{self, OpenOptions};
use std::path::{Path, PathBuf};

use ebbtide_loader::{
    BlockOrder, Checksums, Damaged, Dataset, Encoding, Error, IoMode, Loader, LoaderOptions, LoaderReport,
    LoaderState, Order, PackedFile, PackedWriter, Records, TokenBatch, make_sums,
};
use proptest::prelude::*;
use tempfile::tempdir;

const CONTEXT: usize = 100;
/// More than the fingerprint reads whole.
const TOKENS: u32 = 600_000;
/// A page that the fingerprint does not read, and the windows that have tokens of it.
const PAGE: u64 = 7;
const WINDOWS: u64 = 21;

fn options(order: Order, checksums: Checksums, damaged: Damaged, io: IoMode) -> LoaderOptions {
    let (ram_bytes, io) = (Some(8 << 20), Some(io));
    LoaderOptions { order, batch: 7, seed: 3, ram_bytes, io, checksums, damaged, ..LoaderOptions::default() }
}

fn block() -> Order {
    Order::Block(BlockOrder { block_bytes: 10_000, window_blocks: 3, streams: 2 })
}

fn raw(folder: &Path) -> PathBuf {
    let path = folder.join("tokens.bin");
    fs::write(&path, (0..TOKENS).flat_map(|i| (i as u16).to_le_bytes()).collect::<Vec<u8>>()).unwrap();
    path
}

/// An epoch of batches, and the report.
fn epoch(path: &Path, options: &LoaderOptions) -> Result<(Vec<TokenBatch>, LoaderReport), Error> {
    let dataset = Dataset::open(path)?;
    let samples = dataset.samples(0..dataset.len(), CONTEXT)?;
    let mut loader = Loader::new(&samples, options, LoaderState::default())?;
    let batches = (0..samples.count() / 7).map(|_| loader.next()).collect::<Result<_, _>>()?;
    let report = loader.report();
    loader.finish()?;
    Ok((batches, report))
}

fn flip(path: &Path, at: u64) {
    use std::os::unix::fs::FileExt;
    let file = OpenOptions::new().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 0x10], at).unwrap();
}

#[test]
fn the_first_epoch_makes_checksums_and_the_next_verify() {
    for io in [IoMode::Cached, IoMode::Dropped, IoMode::Direct] {
        for order in [block(), Order::Random] {
            let folder = tempdir().unwrap();
            let path = raw(folder.path());
            let run = |checksums| epoch(&path, &options(order, checksums, Damaged::Stop, io));
            let (plain, report) = run(Checksums::Off).unwrap();
            assert_eq!((report.verified_bytes, report.summed_bytes), (0, 0));
            let (made, report) = run(Checksums::Make(None)).unwrap();
            assert_eq!(made, plain);
            assert!(report.summed_bytes > u64::from(2 * TOKENS) * 9 / 10, "{report:?}");
            let (verified, report) = run(Checksums::Verify).unwrap();
            assert_eq!(verified, plain);
            assert!(report.verified_bytes >= report.gathered_bytes && report.summed_bytes == 0, "{report:?}");
            // What is there already is verified, and not made again.
            let (_, report) = run(Checksums::Make(None)).unwrap();
            assert_eq!((report.summed_bytes, report.damaged_pages), (0, 0));
            assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2, "no temporary file is left");
        }
    }
}

#[test]
fn a_flipped_byte_stops_with_its_place_or_is_set_aside() {
    for order in [block(), Order::Random] {
        for io in [IoMode::Cached, IoMode::Direct] {
            let folder = tempdir().unwrap();
            let path = raw(folder.path());
            let (plain, _) = epoch(&path, &options(order, Checksums::Make(None), Damaged::Stop, io)).unwrap();
            flip(&path, PAGE * 4096 + 100);
            let error =
                epoch(&path, &options(order, Checksums::Verify, Damaged::Stop, io)).unwrap_err().to_string();
            assert!(
                error.contains("tokens.bin: page 7 of 4096 bytes at byte offset 28672 is damaged"),
                "{error}"
            );
            // Without checksums it is taken for what it is.
            let off = epoch(&path, &options(order, Checksums::Off, Damaged::Stop, io)).unwrap().0;
            assert_ne!(off, plain);

            let quarantine = options(order, Checksums::Verify, Damaged::Quarantine, io);
            let (set_aside, report) = epoch(&path, &quarantine).unwrap();
            let mut masked = 0;
            for (found, expected) in set_aside.iter().zip(&plain) {
                assert_eq!(found.position, expected.position);
                for sample in 0..7 {
                    let range = sample * CONTEXT..(sample + 1) * CONTEXT;
                    if found.targets[range.clone()].iter().all(|&target| target == -100) {
                        masked += 1;
                        assert!(found.tokens[range].iter().all(|&token| token == 0));
                    } else {
                        assert_eq!(found.tokens[range.clone()], expected.tokens[range.clone()]);
                        assert_eq!(found.targets[range.clone()], expected.targets[range]);
                    }
                }
            }
            // The last windows of an epoch may not fill a batch.
            assert!((WINDOWS - 6..=WINDOWS).contains(&masked), "{masked}");
            assert!(report.quarantined_samples >= masked && report.damaged_pages >= 1, "{report:?}");
        }
    }
}

#[test]
fn sidecars_that_are_damaged_or_of_another_file_are_errors() {
    let folder = tempdir().unwrap();
    let path = raw(folder.path());
    let report = make_sums(&Dataset::open(&path).unwrap(), None).unwrap();
    assert_eq!((report.made_bytes, report.verified_bytes), (u64::from(2 * TOKENS), 0));
    let again = make_sums(&Dataset::open(&path).unwrap(), None).unwrap();
    assert_eq!((again.made_bytes, again.verified_bytes), (0, u64::from(2 * TOKENS)));
    let sidecar = folder.path().join("tokens.bin.sums");
    let good = fs::read(&sidecar).unwrap();
    let verify = || {
        let options = options(block(), Checksums::Verify, Damaged::Stop, IoMode::Cached);
        epoch(&path, &options).err().map(|error| error.to_string())
    };
    assert_eq!(verify(), None);
    for at in 0..good.len() {
        let mut bad = good.clone();
        bad[at] ^= 1 << (at % 8);
        fs::write(&sidecar, &bad).unwrap();
        let error = verify().unwrap_or_else(|| panic!("byte {at} is not held against anything"));
        assert!(error.contains("tokens.bin.sums: "), "{error}");
    }
    for length in [0, 1, 47, 48, good.len() - 1] {
        fs::write(&sidecar, &good[..length]).unwrap();
        assert!(verify().unwrap().contains("tokens.bin.sums: length"), "{length}");
    }
    fs::write(&sidecar, &good).unwrap();
    fs::write(&path, vec![1u8; 2 * TOKENS as usize]).unwrap();
    let error = verify().unwrap();
    assert!(error.contains("tokens.bin: changed since its checksums were made"), "{error}");
    // In a folder of their own, away from data that may not be written.
    fs::remove_file(&sidecar).unwrap();
    let elsewhere = tempdir().unwrap();
    let make = Checksums::Make(Some(elsewhere.path().to_path_buf()));
    epoch(&path, &options(block(), make, Damaged::Stop, IoMode::Cached)).unwrap();
    assert!(elsewhere.path().join("tokens.bin.sums").exists() && !sidecar.exists());
}

/// Records in any batches from any number of threads.
fn write_packed(path: &Path, records: &[Vec<u16>], batches: usize, threads: usize, fixed: bool) -> u64 {
    let kind = if fixed { Records::Fixed(records[0].len() as u64) } else { Records::Variable };
    let writer = PackedWriter::create(path, Encoding::U16, kind).unwrap();
    let chunks: Vec<&[Vec<u16>]> = records.chunks(records.len().div_ceil(batches)).collect();
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let (writer, chunks) = (&writer, &chunks);
            scope.spawn(move || {
                for (place, chunk) in chunks.iter().enumerate().skip(thread).step_by(threads) {
                    let records: Vec<&[u16]> = chunk.iter().map(Vec::as_slice).collect();
                    writer.put(place as u64, &records).unwrap();
                }
            });
        }
    });
    writer.finish().unwrap()
}

fn bytes(tokens: &[u16]) -> Vec<u8> {
    tokens.iter().flat_map(|token| token.to_le_bytes()).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn packed_records_come_back(
        lengths in prop::collection::vec(prop_oneof![Just(0usize), 1usize..50, 1000usize..6000], 1..40),
        batches in 1usize..12, threads in 1usize..5, fixed: bool,
    ) {
        let length = |i: usize| if fixed { lengths[0].max(1) } else { lengths[i] };
        let records: Vec<Vec<u16>> =
            (0..lengths.len()).map(|i| (0..length(i)).map(|t| (i * 31 + t) as u16).collect()).collect();
        let all: Vec<u16> = records.concat();
        prop_assume!(!all.is_empty());
        let folder = tempdir().unwrap();
        let path = folder.path().join("packed.bin");
        prop_assert_eq!(write_packed(&path, &records, batches, threads, fixed), records.len() as u64);
        let file = PackedFile::open(&path).unwrap();
        prop_assert_eq!((file.records(), file.tokens()), (records.len() as u64, all.len() as u64));
        for (i, record) in records.iter().enumerate() {
            prop_assert_eq!(file.read(i as u64).unwrap(), bytes(record));
        }
        prop_assert!(file.read(records.len() as u64).is_err());
        // The same bytes from one thread, and as a dataset of all tokens.
        let other = folder.path().join("other.bin");
        write_packed(&other, &records, 1, 1, fixed);
        prop_assert_eq!(fs::read(&path).unwrap(), fs::read(&other).unwrap());
        fs::remove_file(&other).unwrap();
        let dataset = Dataset::open(&path).unwrap();
        prop_assert_eq!(dataset.len(), all.len() as u64);
        prop_assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}

#[test]
fn a_packed_file_is_a_dataset_whose_damage_is_seen() {
    let folder = tempdir().unwrap();
    let records: Vec<Vec<u16>> = (0..600u16).map(|i| vec![i; 100]).collect();
    let path = folder.path().join("packed.bin");
    write_packed(&path, &records, 9, 3, false);
    let good = fs::read(&path).unwrap();
    let run = |io| epoch(&path, &options(block(), Checksums::Verify, Damaged::Stop, io));
    let (batches, report) = run(IoMode::Direct).unwrap();
    assert_eq!(batches.len(), 599 / 7);
    assert!(report.verified_bytes >= report.gathered_bytes, "{report:?}");
    // Any byte but the padding of the header's page: at opening or at reading, in the tokens, the index or the sums.
    for at in (0..72).chain((4096..good.len()).step_by(997)) {
        let mut bad = good.clone();
        bad[at] ^= 0x40;
        fs::write(&path, &bad).unwrap();
        let seen = run(IoMode::Cached).is_err()
            || PackedFile::open(&path).map_or(true, |file| (0..600).any(|record| file.read(record).is_err()));
        // Padding after the tokens and the index shares its page with them.
        assert!(seen, "byte {at}");
    }
    for length in [0, 7, 4095, 4096, 9000, good.len() - 1] {
        fs::write(&path, &good[..length]).unwrap();
        assert!(PackedFile::open(&path).is_err(), "{length}");
    }
}

#[test]
fn writing_packed_files_fails_whole() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("packed.bin");
    let create = |records| PackedWriter::create(&path, Encoding::U16, records);
    assert!(create(Records::Fixed(0)).unwrap_err().to_string().contains("tokens of a record"));
    let writer = create(Records::Fixed(3)).unwrap();
    writer.put(0, &[&[1u16, 2, 3]]).unwrap();
    assert!(writer.put(1, &[&[1u16, 2]]).unwrap_err().to_string().contains("expected 3, found 2"));
    // After an error nothing is accepted, and nothing is left.
    assert!(writer.put(1, &[&[1u16, 2, 3]]).is_err());
    assert!(writer.finish().is_err());
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    let writer = create(Records::Variable).unwrap();
    assert!(writer.put(0, &[&[1u32]]).unwrap_err().to_string().contains("expected u16, found u32"));
    drop(writer);
    let writer = create(Records::Variable).unwrap();
    assert!(matches!(writer.finish(), Err(Error::Empty { .. })));
    let writer = create(Records::Variable).unwrap();
    writer.put(0, &[&[1u16]]).unwrap();
    assert!(writer.put(0, &[&[1u16]]).unwrap_err().to_string().contains("batch"), "a place that was taken");
    drop(writer);
    let writer = create(Records::Variable).unwrap();
    writer.put(0, &[&[1u16]]).unwrap();
    fs::write(&path, b"there").unwrap();
    assert!(matches!(writer.finish(), Err(Error::Exists { .. })));
    assert!(matches!(create(Records::Variable), Err(Error::Exists { .. })));
    assert_eq!(fs::read(&path).unwrap(), b"there");
}
