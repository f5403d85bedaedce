//! Files, windows and splits, and what each says about bad input.

use std::fs::{self, OpenOptions};
use std::path::{Path, PathBuf};

use ebbtide_loader::{Error, TokenFile, TokenWriter, Windows, split};
use tempfile::{TempDir, tempdir};

fn write(folder: &Path, tokens: &[u16]) -> PathBuf {
    let path = folder.join("tokens.bin");
    fs::write(&path, tokens.iter().flat_map(|token| token.to_le_bytes()).collect::<Vec<u8>>()).unwrap();
    path
}

/// A file of the tokens 0, 1, 2, ….
fn counting(count: u16) -> (TempDir, TokenFile) {
    let folder = tempdir().unwrap();
    let file = TokenFile::open(write(folder.path(), &(0..count).collect::<Vec<_>>())).unwrap();
    (folder, file)
}

/// The error's message, with the folder taken out.
fn message<T>(folder: &TempDir, result: Result<T, Error>) -> String {
    let error = result.err().expect("an error");
    error.to_string().replace(&format!("{}/", folder.path().display()), "")
}

#[test]
fn reads_what_was_written() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("t.bin");
    let tokens: Vec<u16> = (0..100_000u32).map(|i| (i * 7919 % 65536) as u16).collect();
    let mut writer = TokenWriter::create(&path).unwrap();
    assert!(writer.is_empty());
    for part in tokens.chunks(33_333) {
        writer.write(part).unwrap();
    }
    assert_eq!(writer.len(), 100_000);
    assert_eq!(writer.finish().unwrap(), 100_000);
    let file = TokenFile::open(&path).unwrap();
    assert_eq!((file.len(), file.is_empty(), file.path()), (100_000, false, &*path));
    let mut read = vec![0; 1000];
    file.read(99_000, &mut read).unwrap();
    assert_eq!(read, tokens[99_000..]);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "no temporary file is left");
}

#[test]
fn files_that_are_no_token_files() {
    let folder = tempdir().unwrap();
    let (folder, open) = (&folder, |name: &str| TokenFile::open(folder.path().join(name)));
    fs::write(folder.path().join("odd.bin"), [1, 2, 3]).unwrap();
    fs::write(folder.path().join("empty.bin"), []).unwrap();
    fs::create_dir(folder.path().join("folder")).unwrap();
    assert!(matches!(open("missing.bin"), Err(Error::Open { .. })));
    assert!(message(folder, open("missing.bin")).starts_with("missing.bin: cannot open the token file: "));
    assert_eq!(
        message(folder, open("odd.bin")),
        "odd.bin: expected two bytes a token, found an odd length of 3 bytes"
    );
    assert_eq!(message(folder, open("empty.bin")), "empty.bin: expected at least one token, found none");
    assert_eq!(message(folder, open("folder")), "folder: expected a file of tokens, found a folder");
    #[cfg(unix)]
    assert!(matches!(TokenFile::open("/dev/null"), Err(Error::NotAFile { found: "no regular file", .. })));
}

#[test]
fn reads_outside_of_the_file() {
    let (folder, file) = counting(10);
    assert_eq!(
        message(&folder, file.read(8, &mut [0; 3])),
        "tokens.bin: tokens 8..11 lie outside of the file's 10"
    );
    assert!(matches!(file.read(u64::MAX, &mut [0; 3]), Err(Error::OutOfRange { .. })));
    file.read(10, &mut []).unwrap();
}

#[test]
fn a_file_cut_short_is_an_error_and_no_signal() {
    let (folder, file) = counting(10_000);
    let windows = Windows::new(&file, 0..10_000, 100).unwrap();
    OpenOptions::new().write(true).open(file.path()).unwrap().set_len(10_050).unwrap();
    let (mut inputs, mut targets) = ([0; 100], [0; 100]);
    windows.read(49, &mut inputs, &mut targets).unwrap();
    assert_eq!(
        message(&folder, windows.read(50, &mut inputs, &mut targets)),
        "tokens.bin: cut short since it was opened: expected 202 bytes at byte offset 10000, found 50"
    );
    assert!(matches!(
        file.check_vocabulary(65536),
        Err(Error::CutShort { offset: 0, expected: 20_000, found: 10_050, .. })
    ));
}

#[test]
fn the_first_token_outside_of_the_vocabulary_is_named() {
    // The scan's buffer holds 524288 tokens, so the bad ones are in its second part.
    let folder = tempdir().unwrap();
    let mut tokens = vec![9; 600_000];
    (tokens[530_001], tokens[530_002]) = (10, 65535);
    let file = TokenFile::open(write(folder.path(), &tokens)).unwrap();
    assert_eq!(
        message(&folder, file.check_vocabulary(10)),
        "tokens.bin: token 530001 at byte offset 1060002 is 10, expected less than the vocabulary of 10"
    );
    assert!(matches!(file.check_vocabulary(11), Err(Error::BadToken { index: 530_002, value: 65535, .. })));
    file.check_vocabulary(65536).unwrap();
    assert!(matches!(file.check_vocabulary(0), Err(Error::BadToken { index: 0, .. })));
}

#[test]
fn fingerprints_tell_lengths_and_contents_apart() {
    let folder = tempdir().unwrap();
    let fingerprint = |tokens: &[u16]| TokenFile::open(write(folder.path(), tokens)).unwrap().fingerprint();
    let mut tokens = vec![3; 1_000_000];
    let first = fingerprint(&tokens);
    assert_eq!(fingerprint(&tokens), first);
    assert_ne!(fingerprint(&tokens[..999_999]), first);
    tokens[999_999] = 4;
    assert_ne!(fingerprint(&tokens), first);
    // FNV-1a of the bytes 04 00 00 00 00 00 00 00 01 00 02 00: the order of every dataset hangs on it.
    assert_eq!(fingerprint(&[1, 2]), 0xdf65_c250_5ba7_8b92);
}

#[test]
fn windows_share_only_their_ends() {
    let (_folder, file) = counting(20);
    let windows = Windows::new(&file, 5..19, 4).unwrap();
    assert_eq!((windows.count(), windows.context(), windows.tokens()), (3, 4, 5..19));
    assert_eq!(windows.file().path(), file.path());
    for (index, start) in [(0, 5), (1, 9), (2, 13)] {
        let (mut inputs, mut targets) = ([0; 4], [0; 4]);
        windows.read(index, &mut inputs, &mut targets).unwrap();
        assert_eq!(inputs, [start, start + 1, start + 2, start + 3]);
        assert_eq!(targets, inputs.map(|token| token as i32 + 1));
    }
}

#[test]
fn a_context_of_one_and_the_largest_token() {
    let folder = tempdir().unwrap();
    let file = TokenFile::open(write(folder.path(), &[65535, 32768, 65534])).unwrap();
    let windows = Windows::new(&file, 0..3, 1).unwrap();
    let (mut inputs, mut targets) = ([0], [0]);
    windows.read(0, &mut inputs, &mut targets).unwrap();
    assert_eq!((inputs, targets), ([65535], [32768]));
    windows.read(1, &mut inputs, &mut targets).unwrap();
    assert_eq!((inputs, targets), ([32768], [65534]));
}

#[test]
fn windows_that_cannot_be() {
    let (folder, file) = counting(20);
    assert_eq!(
        message(&folder, Windows::new(&file, 10..14, 4)),
        "tokens.bin: the range (tokens 10..14 of 20) has 4 tokens, a window needs 5: a context of 4 and the token after it"
    );
    assert_eq!(Windows::new(&file, 10..15, 4).unwrap().count(), 1);
    assert_eq!(
        message(&folder, Windows::new(&file, 0..20, 0)),
        "tokens.bin: expected a context of at least one token, found 0"
    );
    assert!(matches!(Windows::new(&file, 0..21, 4), Err(Error::OutOfRange { end: 21, .. })));
    let (start, end) = (9, 3);
    assert!(matches!(Windows::new(&file, start..end, 4), Err(Error::OutOfRange { .. })));
    assert!(matches!(Windows::new(&file, 0..20, usize::MAX), Err(Error::TooShort { .. })));

    let windows = Windows::new(&file, 0..20, 4).unwrap();
    assert_eq!(
        message(&folder, windows.read(4, &mut [0; 4], &mut [0; 4])),
        "tokens.bin: expected the index of one of 4 windows, found 4"
    );
    assert_eq!(
        message(&folder, windows.read(0, &mut [0; 4], &mut [0; 5])),
        "`targets` should have the context's 4 elements, has 5"
    );
    assert!(matches!(
        windows.read(0, &mut [], &mut [0; 4]),
        Err(Error::BadSlice { slice: "inputs", expected: 4, found: 0 })
    ));
}

#[test]
fn splits() {
    let (folder, file) = counting(100);
    let ranges = |fraction, context| {
        let (training, validation) = split(&file, fraction, context).unwrap();
        (training.tokens(), validation.map(|windows| windows.tokens()))
    };
    assert_eq!(ranges(0.0, 8), (0..100, None));
    assert_eq!(ranges(0.25, 8), (0..75, Some(75..100)));
    // At least one window.
    assert_eq!(ranges(1e-9, 8), (0..91, Some(91..100)));
    assert_eq!(
        message(&folder, split(&file, 0.95, 8)),
        "tokens.bin: the training part (tokens 0..5 of 100) has 5 tokens, a window needs 9: \
         a context of 8 and the token after it"
    );
    assert_eq!(
        message(&folder, split(&file, 0.1, 100)),
        "tokens.bin: the validation part (tokens 0..100 of 100) has 100 tokens, a window needs 101: \
         a context of 100 and the token after it"
    );
    assert!(matches!(split(&file, 0.0, 100), Err(Error::TooShort { part: "training part", .. })));
    assert!(matches!(split(&file, 0.1, 0), Err(Error::BadContext { .. })));
    for fraction in [-0.1, 1.0, f64::NAN, f64::INFINITY] {
        assert!(matches!(split(&file, fraction, 8), Err(Error::BadFraction { .. })), "{fraction}");
    }
}

#[test]
fn a_writer_never_overwrites_and_leaves_nothing_unfinished() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("t.bin");
    let files = || fs::read_dir(folder.path()).unwrap().count();

    let mut dropped = TokenWriter::create(&path).unwrap();
    dropped.write(&[1]).unwrap();
    assert!(!path.exists());
    drop(dropped);
    assert_eq!(files(), 0);

    let mut late = TokenWriter::create(&path).unwrap();
    late.write(&[1]).unwrap();
    fs::write(&path, "precious").unwrap();
    assert_eq!(message(&folder, late.finish()), "t.bin: exists already, and is not overwritten");
    assert!(matches!(TokenWriter::create(&path), Err(Error::Exists { .. })));
    assert_eq!(fs::read(&path).unwrap(), b"precious");
    assert_eq!(files(), 1);

    let empty = TokenWriter::create(folder.path().join("empty.bin")).unwrap();
    assert_eq!(message(&folder, empty.finish()), "empty.bin: expected at least one token, found none");
    assert_eq!(files(), 1);
}

#[test]
fn a_writer_without_a_place_to_write() {
    let folder = tempdir().unwrap();
    let missing = TokenWriter::create(folder.path().join("missing/t.bin"));
    assert!(message(&folder, missing).starts_with("missing/t.bin: cannot create the file after 0 tokens: "));
    assert!(TokenWriter::create("").is_err());
    assert!(matches!(TokenWriter::create(folder.path()), Err(Error::Exists { .. })));
}

#[cfg(unix)]
#[test]
fn written_files_have_ordinary_permissions() {
    use std::os::unix::fs::PermissionsExt;

    let folder = tempdir().unwrap();
    let (ordinary, path) = (folder.path().join("ordinary"), folder.path().join("t.bin"));
    fs::write(&ordinary, "x").unwrap();
    let mut writer = TokenWriter::create(&path).unwrap();
    writer.write(&[1]).unwrap();
    writer.finish().unwrap();
    let mode = |path| fs::metadata(path).unwrap().permissions().mode();
    assert_eq!(mode(&path), mode(&ordinary));
}
