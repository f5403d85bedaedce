//! Damaged and hostile files to each reader: a typed error or tokens of the file, never a panic, and no memory beyond the file's size.
//!
//! A valid file of each format is changed at random: bits and bytes flipped, numbers of the header set to extremes, pieces cut out,
//! doubled, moved, ends cut and grown; or all of it is random bytes. A seed gives the same files again; `EBBTIDE_SOAK=1` runs 10^6 a
//! reader.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::fs;
use std::path::{Path, PathBuf};

use ebbtide_loader::{
    Checksums, Dataset, Encoding, Format, Loader, LoaderOptions, LoaderState, PackedFile, PackedWriter,
    Records, TokenFile, make_sums,
};
use tempfile::TempDir;

/// Counts what this thread allocates at once, so that a header cannot make a reader ask for the moon.
struct Counting;

thread_local! {
    static LARGEST: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: everything is the system's; the count is a cell without a destructor, which may be used anywhere.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let _ = LARGEST.try_with(|largest| largest.set(largest.get().max(layout.size())));
        // SAFETY: the caller's contract.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's contract.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// Beyond the file's size: buffers of a fixed size, and lists.
const MOST_BYTES: usize = 4 << 20;

fn cases() -> u64 {
    if std::env::var_os("EBBTIDE_SOAK").is_some() { 1_000_000 } else { 4_000 }
}

/// In memory where the system has such a folder.
fn folder() -> TempDir {
    let memory = Path::new("/dev/shm");
    if memory.is_dir() { tempfile::tempdir_in(memory).unwrap() } else { tempfile::tempdir().unwrap() }
}

fn fixture(name: &str) -> Vec<u8> {
    fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)).unwrap()
}

const EXTREMES: [u64; 12] =
    [0, 1, 0x7F, 0xFF, 0x7FFF, 0xFFFF, 0x7FFF_FFFF, 0xFFFF_FFFF, 1 << 32, i64::MAX as u64, 1 << 63, u64::MAX];

fn change(random: &mut fastrand::Rng, bytes: &mut Vec<u8>) {
    for _ in 0..random.usize(1..4) {
        if bytes.is_empty() {
            bytes.extend((0..random.usize(1..64)).map(|_| random.u8(..)));
        }
        let at = random.usize(..bytes.len());
        match random.u8(..9) {
            0 => bytes[at] ^= 1 << random.u8(..8),
            1 => bytes[at] = random.u8(..),
            2 => bytes.truncate(at),
            3 => bytes.extend((0..random.usize(1..600)).map(|_| 0)),
            4 => {
                let end = random.usize(at..bytes.len());
                bytes.drain(at..end);
            }
            5 => {
                let end = random.usize(at..bytes.len().min(at + 64));
                let piece: Vec<u8> = bytes[at..end].to_vec();
                bytes.splice(at..at, piece);
            }
            6 => bytes.iter_mut().for_each(|byte| *byte = random.u8(..)),
            // A number among the first fields, where headers are; at any place half of the time.
            _ => {
                let at = if random.bool() { at } else { random.usize(..bytes.len().min(96)) };
                let extreme = EXTREMES[random.usize(..EXTREMES.len())].wrapping_add(random.u64(..3));
                let width = [1, 2, 4, 8][random.usize(..4)].min(bytes.len() - at);
                bytes[at..at + width].copy_from_slice(&extreme.to_le_bytes()[..width]);
            }
        }
    }
}

/// Runs a reader over changed copies of files: `read` is given the path of the first.
fn fuzz(name: &str, files: &[(&str, Vec<u8>)], mut read: impl FnMut(&Path) -> bool) {
    let folder = folder();
    let paths: Vec<PathBuf> = files.iter().map(|(name, _)| folder.path().join(name)).collect();
    let mut accepted = 0;
    for (path, (_, bytes)) in paths.iter().zip(files) {
        fs::write(path, bytes).unwrap();
    }
    assert!(read(&paths[0]), "{name}: the file itself");
    for seed in 0..cases() {
        let mut random = fastrand::Rng::with_seed(seed);
        let changed = random.usize(..files.len());
        let mut bytes = files[changed].1.clone();
        change(&mut random, &mut bytes);
        fs::write(&paths[changed], &bytes).unwrap();
        LARGEST.set(0);
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| read(&paths[0])));
        let largest = LARGEST.get();
        match result {
            Ok(read) => accepted += u64::from(read),
            Err(_) => panic!("{name}, seed {seed}: panicked"),
        }
        assert!(largest <= bytes.len() + MOST_BYTES, "{name}, seed {seed}: {largest} bytes at once");
        fs::write(&paths[changed], &files[changed].1).unwrap();
    }
    println!("{name}: {accepted} of {} changed files were read", cases());
}

/// Opens a dataset and reads all of its windows of a context of 3, whatever they hold.
fn read_all(path: &Path, format: Option<Format>) -> bool {
    let Ok(dataset) = Dataset::open_as(path, format) else { return false };
    let bytes = fs::metadata(path).map_or(0, |metadata| metadata.len());
    let Ok(samples) = dataset.samples(0..dataset.len(), 3) else { return false };
    assert!(dataset.len() <= bytes.max(1 << 16), "more tokens than bytes");
    (0..samples.count()).all(|window| samples.read(window, &mut [0; 3], &mut [0; 3]).is_ok())
}

#[test]
fn npy() {
    for name in ["v1_u16.npy", "v2_i32.npy", "v3_i64.npy", "big_endian.npy"] {
        fuzz(name, &[(name, fixture(name))], |path| read_all(path, Some(Format::Npy)));
    }
}

#[test]
fn llm_c() {
    for name in ["llm_c_u16.bin", "llm_c_u32.bin"] {
        fuzz(name, &[(name, fixture(name))], |path| read_all(path, Some(Format::LlmC)));
    }
}

#[test]
fn megatron() {
    let files = [("megatron.bin", fixture("megatron.bin")), ("megatron.idx", fixture("megatron.idx"))];
    fuzz("megatron", &files, |path| read_all(path, Some(Format::Megatron)));
}

#[test]
fn safetensors() {
    let files = [("tokens.safetensors", fixture("tokens.safetensors"))];
    fuzz("safetensors", &files, |path| read_all(path, Some(Format::Safetensors(None))));
}

#[test]
fn raw() {
    let files = [("tokens.bin", (0..500u16).flat_map(u16::to_le_bytes).collect::<Vec<u8>>())];
    fuzz("raw", &files, |path| read_all(path, Some(Format::Raw(Encoding::U16))));
    fuzz("token file", &files, |path| {
        let Ok(file) = TokenFile::open(path) else { return false };
        file.read(0, &mut vec![0; file.len() as usize]).is_ok()
    });
}

/// Any format, as names and first bytes have it.
#[test]
fn guessed_in_a_folder() {
    let files = [
        ("a.npy", fixture("v1_u16.npy")),
        ("b.bin", fixture("llm_c_u16.bin")),
        ("c.safetensors", fixture("tokens.safetensors")),
        ("d.bin", (0..500u16).flat_map(u16::to_le_bytes).collect()),
    ];
    fuzz("folder", &files, |path| read_all(path.parent().unwrap(), None));
}

fn packed(records: Records) -> Vec<u8> {
    let folder = folder();
    let path = folder.path().join("packed.bin");
    let writer = PackedWriter::create(&path, Encoding::U16, records).unwrap();
    let record: Vec<u16> = (0..300).collect();
    for place in 0..8 {
        writer.put(place, &[&record[..]]).unwrap();
    }
    writer.finish().unwrap();
    fs::read(path).unwrap()
}

#[test]
fn packed_files() {
    for records in [Records::Variable, Records::Fixed(300)] {
        fuzz("packed", &[("packed.bin", packed(records))], |path| {
            let as_dataset = read_all(path, Some(Format::Packed));
            let Ok(file) = PackedFile::open(path) else { return false };
            as_dataset && (0..file.records().min(10_000)).all(|record| file.read(record).is_ok())
        });
    }
}

/// A sidecar that says anything, beside data that may be anything.
#[test]
fn sidecars() {
    let made = folder();
    let data: Vec<u8> = (0..9000u16).flat_map(u16::to_le_bytes).collect();
    fs::write(made.path().join("tokens.bin"), &data).unwrap();
    make_sums(&Dataset::open(made.path().join("tokens.bin")).unwrap(), None).unwrap();
    let sums = fs::read(made.path().join("tokens.bin.sums")).unwrap();
    let options = LoaderOptions {
        batch: 4,
        ram_bytes: Some(1 << 20),
        threads: 1,
        batches_ahead: 1,
        checksums: Checksums::Verify,
        ..LoaderOptions::default()
    };
    // A loader starts threads, so there are fewer cases of them: every hundredth.
    let mut turn = 0u64;
    fuzz("sidecar", &[("tokens.bin", data), ("tokens.bin.sums", sums)], |path| {
        turn += 1;
        let Ok(dataset) = Dataset::open_as(path, Some(Format::Raw(Encoding::U16))) else { return false };
        if turn % 100 == 1 {
            let Ok(samples) = dataset.samples(0..dataset.len(), 8) else { return false };
            let Ok(mut loader) = Loader::new(&samples, &options, LoaderState::default()) else {
                return false;
            };
            return (0..10).all(|_| loader.next().is_ok());
        }
        make_sums(&dataset, None).is_ok()
    });
}
