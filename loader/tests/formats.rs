//! Files as other programs write them, read where they lie; and what is said of those that cannot be.
//!
//! `fixtures/make.py` wrote the fixtures.

use std::fs;
use std::path::{Path, PathBuf};

use ebbtide_loader::{Dataset, Encoding, Error, Format, Samples, TokenFile, Windows};
use proptest::prelude::*;
use tempfile::{TempDir, tempdir};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

/// The tokens that every fixture holds.
fn expected() -> Vec<u32> {
    (0..100).map(|i| (37 * i + 11) % 1000).collect()
}

/// All tokens that the windows of a context of 1 have.
fn tokens(samples: &Samples) -> Vec<u32> {
    let mut all = Vec::new();
    for window in 0..samples.count() {
        let (mut input, mut target) = ([0], [0]);
        samples.read(window, &mut input, &mut target).unwrap();
        all.extend((window == 0).then_some(input[0]));
        all.push(target[0] as u32);
    }
    all
}

fn all(dataset: &Dataset) -> Vec<u32> {
    tokens(&dataset.samples(0..dataset.len(), 1).unwrap())
}

/// A header's error, as `FIELD @ OFFSET: expected …, found …`.
fn refusal(result: Result<Dataset, Error>) -> String {
    match result {
        Err(Error::BadHeader { field, offset, expected, found, .. }) => {
            format!("{field} @ {offset}: expected {expected}, found {found}")
        }
        other => panic!("{other:?}"),
    }
}

/// A copy of a fixture with some bytes changed.
fn changed(name: &str, change: impl FnOnce(&mut Vec<u8>)) -> (TempDir, PathBuf) {
    let folder = tempdir().unwrap();
    let mut bytes = fs::read(fixture(name)).unwrap();
    change(&mut bytes);
    let path = folder.path().join(name);
    fs::write(&path, bytes).unwrap();
    (folder, path)
}

#[test]
fn files_of_other_programs() {
    let names = [
        "v1_u16.npy",
        "v2_i32.npy",
        "v3_i64.npy",
        "big_endian.npy",
        "rows.npy",
        "fortran_column.npy",
        "llm_c_u16.bin",
        "llm_c_u32.bin",
        "megatron.bin",
        "megatron.idx",
        "tokens.safetensors",
    ];
    for name in names {
        let dataset = Dataset::open(fixture(name)).unwrap();
        assert_eq!(dataset.len(), 100, "{name}");
        assert_eq!(all(&dataset), expected(), "{name}");
    }
}

#[test]
fn a_tensor_by_name() {
    let open = |name: &str| {
        Dataset::open_as(fixture("two.safetensors"), Some(Format::Safetensors(Some(name.into()))))
    };
    assert_eq!(all(&open("a").unwrap()), expected());
    assert_eq!(all(&open("b").unwrap()), expected()[..7]);
    assert!(refusal(open("c")).starts_with("the tensors @ 8: expected a tensor c, found 2 tensors ("));
    assert!(refusal(Dataset::open(fixture("two.safetensors"))).starts_with(
        "the tensors @ 8: expected one tensor of integers, or the name of one, found 2 tensors"
    ));
}

#[test]
fn arrays_that_are_refused_by_name() {
    let open = |name: &str| refusal(Dataset::open(fixture(name)));
    assert_eq!(
        open("refused_fortran.npy"),
        "fortran_order @ 59: expected False, rows first, found True for the shape [4, 25]"
    );
    let integer = "descr @ 20: expected an integer type, such as '<u2', found";
    assert_eq!(open("refused_float.npy"), format!("{integer} '<f4'"));
    assert_eq!(open("refused_object.npy"), format!("{integer} '|O', Python objects"));
    assert_eq!(open("refused_structured.npy"), format!("{integer} a structured type"));
    assert!(matches!(Dataset::open(fixture("refused_empty.npy")), Err(Error::Empty { .. })));
}

#[test]
fn npy_headers_are_held_against_the_file() {
    let open = |change: &dyn Fn(&mut Vec<u8>)| {
        let (_folder, path) = changed("v1_u16.npy", |bytes| change(bytes));
        refusal(Dataset::open(path))
    };
    assert_eq!(open(&|bytes| bytes[1] = b'M'), "the magic string @ 0: expected \\x93NUMPY, found \\x93MUMPY");
    assert_eq!(open(&|bytes| bytes[6] = 4), "the version @ 6: expected 1.0, 2.0 or 3.0, found 4.0");
    assert_eq!(
        open(&|bytes| bytes[8..10].fill(0xff)),
        "the header @ 10: expected 65535 bytes, found a file that ends at byte 328"
    );
    assert_eq!(
        open(&|bytes| bytes.truncate(7)),
        "the version @ 6: expected 2 bytes, found a file that ends at byte 7"
    );
    assert_eq!(
        open(&|bytes| bytes.truncate(327)),
        "the shape @ 60: expected a file of 328 bytes, found one of 327"
    );
    assert_eq!(
        open(&|bytes| bytes.push(0)),
        "the shape @ 60: expected a file of 328 bytes, found one of 329"
    );
    // Headers as they are found elsewhere.
    let with = |header: &str| {
        let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
        bytes.extend((header.len() as u16).to_le_bytes());
        bytes.extend(header.as_bytes());
        bytes.extend([1, 0, 2, 0, 3, 0]);
        let folder = tempdir().unwrap();
        let path = folder.path().join("t.npy");
        fs::write(&path, bytes).unwrap();
        Dataset::open(path).map(|dataset| all(&dataset))
    };
    for header in [
        "{'descr': '<u2', 'fortran_order': False, 'shape': (3,), }\n",
        "{'shape':(3L,),'fortran_order':True,\"descr\":'<i2'}",
        "{ 'fortran_order' : False , 'descr' : '<u2' , 'shape' : ( 1 , 3 ) } ",
    ] {
        assert_eq!(with(header).unwrap(), [1, 2, 3], "{header}");
    }
    for header in [
        "",
        "{}",
        "{'descr': '<u2', 'fortran_order': False}",
        "{'descr': '<u2', 'descr': '<u2', 'fortran_order': False, 'shape': (3,)}",
        "{'descr': '<u2', 'fortran_order': False, 'shape': (3,), 'more': 1}",
        "{'descr': '<u2', 'fortran_order': 0, 'shape': (3,)}",
        "{'descr': '<u2', 'fortran_order': False, 'shape': (np.int64(3),)}",
        "{'descr': '<u2', 'fortran_order': False, 'shape': (-3,)}",
        "{'descr': '<u2', 'fortran_order': False, 'shape': (99999999999999999999,)}",
        "{'descr': '<u2', 'fortran_order': False, 'shape': (4294967296, 4294967296, 3)}",
        "{'descr': '<u2', 'fortran_order': False, 'shape': (3,)} and more",
        "{'descr': '<u3', 'fortran_order': False, 'shape': (2,)}",
        "{'descr': '<u2",
    ] {
        assert!(matches!(with(header), Err(Error::BadHeader { .. })), "{header}");
    }
}

#[test]
fn llm_c_headers_are_held_against_the_file() {
    let open = |change: &dyn Fn(&mut Vec<u8>)| {
        let (_folder, path) = changed("llm_c_u16.bin", |bytes| change(bytes));
        refusal(Dataset::open(path))
    };
    assert_eq!(open(&|bytes| bytes[4] = 7), "the version @ 4: expected 1, found 7");
    assert_eq!(
        open(&|bytes| bytes[8] = 99),
        "the count of tokens @ 8: expected a file of 1222 bytes, found one of 1224"
    );
    assert_eq!(
        open(&|bytes| bytes[11] = 0x80),
        "the count of tokens @ 8: expected no negative number, found -2147483548"
    );
    assert_eq!(
        open(&|bytes| bytes[0] += 2),
        "the magic number @ 0: expected 20240520 or 20240801, found 20240522, an evaluation file"
    );
    assert!(open(&|bytes| bytes.truncate(1100)).starts_with("the count of tokens @ 8: "));
}

#[test]
fn megatron_indices_are_held_against_the_data() {
    let open = |change: &dyn Fn(&mut Vec<u8>), data: usize| {
        let (folder, path) = changed("megatron.idx", |bytes| change(bytes));
        fs::write(folder.path().join("megatron.bin"), &fs::read(fixture("megatron.bin")).unwrap()[..data])
            .unwrap();
        Dataset::open(path)
    };
    let refused =
        |change: &dyn Fn(&mut Vec<u8>)| refusal(open(change, 200)).replace(char::is_whitespace, " ");
    assert!(open(&|_| {}, 200).is_ok());
    // The modes of indices of several kinds of data.
    assert!(open(&|bytes| bytes.extend([0, 0, 0]), 200).is_ok());
    assert_eq!(refused(&|bytes| bytes[9] = 2), "the version @ 9: expected 1, found 2");
    assert_eq!(
        refused(&|bytes| bytes[17] = 7),
        "the type of tokens @ 17: expected an integer type: 1 to 5 or 8, found 7 (f32)"
    );
    assert_eq!(
        refused(&|bytes| bytes[18] = 4),
        "the counts of sequences and documents @ 18: expected a file of 106 bytes, found one of 94"
    );
    assert!(refused(&|bytes| bytes[18..34].fill(0xff)).starts_with("the counts @ 18: "));
    assert!(refused(&|bytes| bytes.truncate(93)).starts_with("the counts of sequences and documents @ 18: "));
    // The second place.
    assert_eq!(refused(&|bytes| bytes[54] = 61), "the place of a sequence @ 54: expected 60, found 61");
    assert!(
        refused(&|bytes| bytes[61] = 0x80).starts_with("the place of a sequence @ 54: expected 60, found -")
    );
    assert!(
        refused(&|bytes| bytes[37] = 0x80)
            .starts_with("the length of a sequence @ 34: expected 0 to 100 tokens")
    );
    assert!(
        refused(&|bytes| bytes[42] = 21)
            .starts_with("the length of a sequence @ 42: expected 0 to 20 tokens")
    );
    assert!(
        refused(&|bytes| bytes[42] = 19)
            .starts_with("the lengths of sequences @ 34: expected the 200 bytes of ")
    );
    assert_eq!(refused(&|bytes| bytes[70] = 1), "the end of a document @ 70: expected 0 to 0, found 1");
    assert_eq!(refused(&|bytes| bytes[78] = 4), "the end of a document @ 78: expected 0 to 3, found 4");
    assert_eq!(refused(&|bytes| bytes[86] = 2), "the end of the last document @ 86: expected 3, found 2");
    assert!(matches!(open(&|_| {}, 199), Err(Error::BadHeader { .. })));
}

#[test]
fn safetensors_headers_are_held_against_the_file() {
    let write = |header: &str, data: usize| {
        let folder = tempdir().unwrap();
        let path = folder.path().join("t.safetensors");
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        bytes.extend((0..data).map(|i| (i % 2) as u8));
        fs::write(&path, bytes).unwrap();
        Dataset::open(path).map(|dataset| dataset.len())
    };
    let tensor = |shape: &str, range: &str| {
        format!("{{\"dtype\":\"U16\",\"shape\":{shape},\"data_offsets\":{range}}}")
    };
    assert_eq!(write(&format!("{{\"t\":{}}}  ", tensor("[3]", "[0,6]")), 6).unwrap(), 3);
    for (header, data) in [
        (format!("{{\"t\":{}}}", tensor("[3]", "[0,6]")), 7),
        (format!("{{\"t\":{}}}", tensor("[3]", "[0,6]")), 5),
        (format!("{{\"t\":{}}}", tensor("[4]", "[0,6]")), 6),
        (format!("{{\"t\":{}}}", tensor("[3]", "[6,0]")), 6),
        (format!("{{\"t\":{}}}", tensor("[3]", "[2,8]")), 8),
        (format!("{{\"t\":{}}}", tensor("[4294967296,4294967296]", "[0,6]")), 6),
        (format!("{{\"t\":{},\"t\":{}}}", tensor("[3]", "[0,6]"), tensor("[1]", "[6,8]")), 8),
        (format!("{{\"t\":{},\"u\":{}}}", tensor("[3]", "[0,6]"), tensor("[3]", "[4,10]")), 10),
        ("{\"t\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}".to_owned(), 4),
        ("[]".to_owned(), 0),
        ("{\"t\"".to_owned(), 0),
    ] {
        assert!(matches!(write(&header, data), Err(Error::BadHeader { .. })), "{header}");
    }
    let (_folder, path) = changed("tokens.safetensors", |bytes| bytes[..8].fill(0xff));
    assert!(
        refusal(Dataset::open(path)).starts_with("the header's length @ 0: expected at most 100000000 bytes")
    );
    let (_folder, path) =
        changed("tokens.safetensors", |bytes| bytes[..8].copy_from_slice(&9999u64.to_le_bytes()));
    assert!(refusal(Dataset::open(path)).starts_with("the header's length @ 0: expected at most "));
}

#[test]
fn a_folder_is_one_dataset_of_shards_by_name() {
    let folder = tempdir().unwrap();
    for (name, as_name) in
        [("llm_c_u16.bin", "b.bin"), ("v1_u16.npy", "a.npy"), ("tokens.safetensors", "d.safetensors")]
    {
        fs::copy(fixture(name), folder.path().join(as_name)).unwrap();
    }
    fs::copy(fixture("megatron.bin"), folder.path().join("c.bin")).unwrap();
    fs::copy(fixture("megatron.idx"), folder.path().join("c.idx")).unwrap();
    fs::write(folder.path().join(".hidden.bin"), [1]).unwrap();
    fs::write(folder.path().join("README.md"), "tokens").unwrap();
    let dataset = Dataset::open(folder.path()).unwrap();
    assert_eq!(dataset.len(), 400);
    let names: Vec<String> = dataset.identity().shards.into_iter().map(|shard| shard.name).collect();
    assert_eq!(names, ["a.npy", "b.bin", "c.bin", "d.safetensors"]);
    // No window crosses from one file into the next: 24 windows of 4 in each.
    let samples = dataset.samples(0..400, 4).unwrap();
    assert_eq!(samples.count(), 96);
    let (mut inputs, mut targets) = ([0; 4], [0; 4]);
    samples.read(24, &mut inputs, &mut targets).unwrap();
    assert_eq!(inputs, expected()[..4]);
    let place = samples.place(25).unwrap();
    assert_eq!((place.path, place.tokens), (&*folder.path().join("b.bin"), 4..9));
    assert_eq!(samples.place(96), None);
    // A split may fall within a file, and its parts share no token.
    let (training, validation) = dataset.split(0.3, 4).unwrap();
    assert_eq!((training.count(), validation.unwrap().count()), (24 + 24 + 19, 4 + 24));
    let empty = tempdir().unwrap();
    assert!(matches!(Dataset::open(empty.path()), Err(Error::NoShards { .. })));
    fs::write(folder.path().join("e.bin"), [1]).unwrap();
    assert!(matches!(Dataset::open(folder.path()), Err(Error::OddLength { bytes: 1, .. })));
}

#[test]
fn a_raw_file_is_the_same_dataset_either_way() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("t.bin");
    fs::write(&path, (0..5000u16).flat_map(u16::to_le_bytes).collect::<Vec<_>>()).unwrap();
    let file = TokenFile::open(&path).unwrap();
    let dataset = Dataset::open(&path).unwrap();
    assert_eq!((dataset.fingerprint(), dataset.len()), (file.fingerprint(), file.len()));
    let windows = Windows::new(&file, 7..4001, 9).unwrap();
    let samples = Samples::of(&windows).unwrap();
    assert_eq!(samples.count(), windows.count());
    let (mut inputs, mut targets) = ([0; 9], [0; 9]);
    let (mut other_inputs, mut other_targets) = ([0; 9], [0; 9]);
    windows.read(5, &mut inputs, &mut targets).unwrap();
    samples.read(5, &mut other_inputs, &mut other_targets).unwrap();
    assert_eq!((inputs, targets), (other_inputs, other_targets));
}

#[test]
fn numbers_that_are_no_tokens() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("t.bin");
    fs::write(&path, [7u32, 8, 1 << 31, 9].map(u32::to_le_bytes).concat()).unwrap();
    let dataset = Dataset::open_as(&path, Some(Format::Raw(Encoding::U32))).unwrap();
    let samples = dataset.samples(0..4, 1).unwrap();
    let (mut input, mut target) = ([0], [0]);
    samples.read(0, &mut input, &mut target).unwrap();
    let error = samples.read(1, &mut input, &mut target).unwrap_err();
    assert!(error.to_string().ends_with(
        "t.bin: token 2 at byte offset 8 is 2147483648, expected at least 0 and below 2147483648"
    ));
    let raw = |format| refusal(Dataset::open_as(fixture("megatron.bin"), Some(format)));
    let (_folder, path) = changed("megatron.bin", |bytes| bytes.truncate(198));
    assert!(
        refusal(Dataset::open_as(path, Some(Format::Raw(Encoding::U32))))
            .starts_with("length @ 0: expected a multiple")
    );
    assert!(raw(Format::LlmC).starts_with("the magic number @ 0: "));
    assert!(raw(Format::Npy).starts_with("the magic string @ 0: "));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Whatever is done to a file, opening it is a dataset or an error.
    #[test]
    fn damaged_files_never_panic(
        name in prop::sample::select(vec!["v1_u16.npy", "v3_i64.npy", "llm_c_u32.bin", "megatron.idx", "tokens.safetensors"]),
        changes in prop::collection::vec((0usize..400, any::<u8>()), 1..6),
        cut in prop::option::of(0usize..400),
    ) {
        let (folder, path) = changed(name, |bytes| {
            for (at, value) in changes {
                let at = at % bytes.len();
                bytes[at] = value;
            }
            bytes.truncate(cut.unwrap_or(usize::MAX));
        });
        fs::copy(fixture("megatron.bin"), folder.path().join("megatron.bin")).unwrap();
        if let Ok(dataset) = Dataset::open(path)
            && let Ok(samples) = dataset.samples(0..dataset.len(), 3)
        {
            let _ = samples.read(samples.count() - 1, &mut [0; 3], &mut [0; 3]);
        }
    }

    /// What NumPy's layout holds is what comes back, for every type of integer.
    #[test]
    fn npy_round_trips(tokens in prop::collection::vec(0u8..128, 2..200), width in prop::sample::select(vec![1usize, 2, 4, 8]), signed: bool, big_endian: bool) {
        let order = if width == 1 { '|' } else if big_endian { '>' } else { '<' };
        let kind = if signed { 'i' } else { 'u' };
        let header = format!("{{'descr': '{order}{kind}{width}', 'fortran_order': False, 'shape': ({},), }}\n", tokens.len());
        let mut bytes = b"\x93NUMPY\x02\x00".to_vec();
        bytes.extend((header.len() as u32).to_le_bytes());
        bytes.extend(header.as_bytes());
        for &token in &tokens {
            let mut number = u64::from(token).to_le_bytes()[..width].to_vec();
            if big_endian {
                number.reverse();
            }
            bytes.extend(number);
        }
        let folder = tempdir().unwrap();
        let path = folder.path().join("t.npy");
        fs::write(&path, bytes).unwrap();
        prop_assert_eq!(all(&Dataset::open(path).unwrap()), tokens.into_iter().map(u32::from).collect::<Vec<_>>());
    }
}
