//! Text files, or folders of them, to a token file.
//!
//! Files are read in pieces of 1 MiB, so a text may be larger than memory. A description stands beside the token file
//! (`corpus.bin.json`), so that training knows what its tokens are; it is written first, so a token file is never without.

use std::{
    fs::{self, File},
    io::{Read, Write},
    path::{Path, PathBuf},
};

use ebbtide_loader::TokenWriter;
use serde::{Deserialize, Serialize};
use walkdir::WalkDir;

use crate::tokenizer::{Tokenizer, TokenizerError, TokenizerKind};

const PIECE_BYTES: usize = 1 << 20;

/// How text is packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackOptions {
    /// What tokens are.
    pub tokenizer: TokenizerKind,
}

/// What was packed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PackReport {
    /// Text files.
    pub files: usize,
    /// Their bytes.
    pub text_bytes: u64,
    /// Tokens written.
    pub tokens: u64,
    /// The token file.
    pub out: PathBuf,
}

/// What stands beside a token file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sidecar {
    /// What the tokens are.
    pub tokenizer: TokenizerKind,
    /// Tokens there are.
    pub vocabulary: usize,
    /// Tokens in the file.
    pub tokens: u64,
    /// Bytes of text that they came from.
    pub text_bytes: u64,
    /// Text files that they came from.
    pub documents: usize,
}

/// What can go wrong.
#[derive(Debug, thiserror::Error)]
pub enum PackError {
    /// The system refused an operation on a file.
    #[error("{path}: cannot {action}: {reason}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The operation.
        action: &'static str,
        /// The system's reason.
        reason: std::io::Error,
    },
    /// A text file holds nothing.
    #[error("{path}: empty: expected text")]
    Empty {
        /// The file.
        path: PathBuf,
    },
    /// A text file is not UTF-8.
    #[error("{path}: not UTF-8: the byte at offset {offset} belongs to no character")]
    NotUtf8 {
        /// The file.
        path: PathBuf,
        /// The first byte that is wrong.
        offset: u64,
    },
    /// Nothing was asked for.
    #[error("{out}: no inputs: expected text files or folders")]
    NoInputs {
        /// The token file that was to be.
        out: PathBuf,
    },
    /// The name of the description belongs to another file.
    #[error("{path}: exists already, and is not the description of a token file")]
    SidecarTaken {
        /// The file.
        path: PathBuf,
    },
    /// A folder without text files.
    #[error("{path}: no text in the folder: expected files that end in .txt or .md")]
    NoText {
        /// The folder.
        path: PathBuf,
    },
    /// A description that cannot be understood.
    #[error("{path}: not the description of a token file: {message}")]
    Sidecar {
        /// The file.
        path: PathBuf,
        /// Where and what.
        message: String,
    },
    /// The token file cannot be written.
    #[error(transparent)]
    Loader(#[from] ebbtide_loader::Error),
    /// The tokenizer's.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
}

/// Bytes of text that [`pack`] will read.
///
/// # Errors
/// Those of finding the files.
pub fn input_bytes(inputs: &[PathBuf]) -> Result<u64, PackError> {
    Ok(files(inputs)?.iter().map(|(_, bytes)| bytes).sum())
}

/// Packs text files, and the `.txt` and `.md` files of folders, sorted by path, into a token file at `out`. After each
/// document comes GPT-2's end of text; with bytes, a line feed where the document does not end in one. `progress` is told the
/// bytes read so far.
///
/// # Errors
/// [`PackError`]; nothing is left at `out` then. A file beside `out` that has the description's name is replaced only if it
/// is the description of a token file since removed; another is an error and stays.
pub fn pack(
    inputs: &[PathBuf],
    out: &Path,
    options: &PackOptions,
    progress: &mut dyn FnMut(u64),
) -> Result<PackReport, PackError> {
    if inputs.is_empty() {
        return Err(PackError::NoInputs { out: out.to_path_buf() });
    }
    let files = files(inputs)?;
    let tokenizer = Tokenizer::new(options.tokenizer)?;
    let mut writer = TokenWriter::create(out)?;
    check_sidecar(out)?;
    let mut text_bytes = 0;
    for (path, _) in &files {
        text_bytes += pack_file(path, &tokenizer, &mut writer, &mut |bytes| progress(text_bytes + bytes))?;
    }
    let sidecar = Sidecar {
        tokenizer: options.tokenizer,
        vocabulary: options.tokenizer.vocabulary(),
        tokens: writer.len(),
        text_bytes,
        documents: files.len(),
    };
    // Once more, since packing may take hours: a token file that came to be meanwhile keeps its own description.
    if fs::symlink_metadata(out).is_ok() {
        return Err(ebbtide_loader::Error::Exists { path: out.to_path_buf() }.into());
    }
    check_sidecar(out)?;
    let beside = sidecar_path(out);
    write_sidecar(&beside, &sidecar)?;
    let tokens = writer.finish().inspect_err(|_| {
        // A description of nothing.
        let _ = fs::remove_file(&beside);
    })?;
    Ok(PackReport { files: files.len(), text_bytes, tokens, out: out.to_path_buf() })
}

/// What stands beside a token file, if anything does.
///
/// # Errors
/// [`PackError::Io`], [`PackError::Sidecar`].
pub fn read_sidecar(token_file: &Path) -> Result<Option<Sidecar>, PackError> {
    let path = sidecar_path(token_file);
    match fs::read(&path) {
        Ok(text) => serde_json::from_slice(&text)
            .map(Some)
            .map_err(|error| PackError::Sidecar { path, message: error.to_string() }),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(reason) => Err(PackError::Io { path, action: "read", reason }),
    }
}

fn sidecar_path(token_file: &Path) -> PathBuf {
    let mut name = token_file.file_name().unwrap_or_default().to_os_string();
    name.push(".json");
    token_file.with_file_name(name)
}

/// Refuses to replace what is not the description of a token file.
fn check_sidecar(token_file: &Path) -> Result<(), PackError> {
    match read_sidecar(token_file) {
        Ok(_) => Ok(()),
        Err(PackError::Sidecar { path, .. }) => Err(PackError::SidecarTaken { path }),
        Err(error) => Err(error),
    }
}

fn write_sidecar(path: &Path, sidecar: &Sidecar) -> Result<(), PackError> {
    let text = serde_json::to_vec_pretty(sidecar)
        .map_err(|error| PackError::Sidecar { path: path.to_path_buf(), message: error.to_string() })?;
    let partial = path.with_extension("json.partial");
    let write = || {
        let mut file = File::create(&partial)?;
        file.write_all(&text)?;
        file.sync_all()?;
        fs::rename(&partial, path)
    };
    write().map_err(|reason| {
        let _ = fs::remove_file(&partial);
        PackError::Io { path: path.to_path_buf(), action: "write", reason }
    })
}

/// The text files that inputs stand for, with their bytes.
fn files(inputs: &[PathBuf]) -> Result<Vec<(PathBuf, u64)>, PackError> {
    let mut files = Vec::new();
    for input in inputs {
        let io = |action| {
            let path = input.clone();
            move |reason| PackError::Io { path, action, reason }
        };
        let metadata = fs::metadata(input).map_err(io("open"))?;
        let before = files.len();
        if metadata.is_dir() {
            for entry in WalkDir::new(input).sort_by_file_name() {
                let entry = entry.map_err(|error| io("list the folder")(error.into()))?;
                let extension = entry.path().extension().and_then(|extension| extension.to_str());
                if entry.file_type().is_file() && matches!(extension, Some("txt" | "md")) {
                    let metadata = entry.metadata().map_err(|error| io("list the folder")(error.into()))?;
                    files.push((entry.into_path(), metadata.len()));
                }
            }
            if files.len() == before {
                return Err(PackError::NoText { path: input.clone() });
            }
        } else {
            files.push((input.clone(), metadata.len()));
        }
    }
    match files.iter().find(|(path, bytes)| *bytes == 0 && path.is_file()) {
        Some((path, _)) => Err(PackError::Empty { path: path.clone() }),
        None => Ok(files),
    }
}

/// Packs a document, and gives its bytes.
fn pack_file(
    path: &Path,
    tokenizer: &Tokenizer,
    writer: &mut TokenWriter,
    progress: &mut dyn FnMut(u64),
) -> Result<u64, PackError> {
    let io = |action| move |reason| PackError::Io { path: path.to_path_buf(), action, reason };
    let mut file = File::open(path).map_err(io("open"))?;
    let mut encoder = tokenizer.encoder();
    let mut buffer = vec![0; PIECE_BYTES];
    // Bytes at the front of the buffer that begin a character whose rest has not been read.
    let (mut kept, mut bytes, mut last) = (0, 0u64, 0u8);
    loop {
        let read = match file.read(&mut buffer[kept..]) {
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
            read => read.map_err(io("read"))?,
        };
        let available = kept + read;
        let offset = bytes - kept as u64;
        bytes += read as u64;
        let valid = match std::str::from_utf8(&buffer[..available]) {
            Ok(_) => available,
            Err(error) if error.error_len().is_none() && read > 0 => error.valid_up_to(),
            Err(error) => {
                let offset = offset + error.valid_up_to() as u64;
                return Err(PackError::NotUtf8 { path: path.to_path_buf(), offset });
            }
        };
        if read == 0 {
            break;
        }
        // Checked just now.
        writer.write(&encoder.push(&String::from_utf8_lossy(&buffer[..valid])))?;
        last = if valid > 0 { buffer[valid - 1] } else { last };
        buffer.copy_within(valid..available, 0);
        kept = available - valid;
        progress(bytes);
    }
    if bytes == 0 {
        return Err(PackError::Empty { path: path.to_path_buf() });
    }
    writer.write(&encoder.finish())?;
    match tokenizer.end_of_text() {
        Some(end) => writer.write(&[end])?,
        None if last != b'\n' => writer.write(&[u16::from(b'\n')])?,
        None => {}
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use ebbtide_loader::TokenFile;

    use super::*;

    fn packed(folder: &Path, inputs: &[PathBuf], kind: TokenizerKind) -> Result<Vec<u16>, PackError> {
        let out = folder.join(format!("{kind}.bin"));
        let report = pack(inputs, &out, &PackOptions { tokenizer: kind }, &mut |_| {})?;
        let file = TokenFile::open(&out)?;
        assert_eq!(report.tokens, file.len());
        let sidecar = read_sidecar(&out)?.unwrap();
        assert_eq!((sidecar.tokens, sidecar.tokenizer), (file.len(), kind));
        let mut tokens = vec![0; file.len() as usize];
        file.read(0, &mut tokens)?;
        Ok(tokens)
    }

    #[test]
    fn documents_end_and_folders_are_walked_in_order() {
        let folder = tempfile::tempdir().unwrap();
        let texts = folder.path().join("texts");
        fs::create_dir_all(texts.join("b")).unwrap();
        for (name, text) in
            [("c.txt", "third\n"), ("a.md", "first"), ("b/x.txt", "second"), ("skip.rs", "no")]
        {
            fs::write(texts.join(name), text).unwrap();
        }
        let tokens = packed(folder.path(), std::slice::from_ref(&texts), TokenizerKind::Bytes).unwrap();
        let bytes: Vec<u8> = tokens.iter().map(|&token| token as u8).collect();
        assert_eq!(bytes, b"first\nsecond\nthird\n");
        let tokenizer = Tokenizer::new(TokenizerKind::Gpt2).unwrap();
        let tokens =
            packed(folder.path(), &[texts.join("a.md"), texts.join("c.txt")], TokenizerKind::Gpt2).unwrap();
        let expected: Vec<u16> =
            [tokenizer.encode("first"), vec![50256], tokenizer.encode("third\n"), vec![50256]].concat();
        assert_eq!(tokens, expected);
    }

    /// A text of several pieces, whose characters straddle the borders.
    #[test]
    fn long_texts_are_packed_as_the_whole() {
        let folder = tempfile::tempdir().unwrap();
        let text: String = (0..700_000).map(|i| ["né ", "漢字", " 'll", "\u{1F30A}\n"][i * 7 % 4]).collect();
        assert!(text.len() > 2 * PIECE_BYTES);
        let path = folder.path().join("long.txt");
        fs::write(&path, &text).unwrap();
        let tokens = packed(folder.path(), std::slice::from_ref(&path), TokenizerKind::Gpt2).unwrap();
        let tokenizer = Tokenizer::new(TokenizerKind::Gpt2).unwrap();
        assert!(tokens[..tokens.len() - 1] == tokenizer.encode(&text));
        let tokens = packed(folder.path(), &[path], TokenizerKind::Bytes).unwrap();
        assert!(tokens.iter().map(|&token| token as u8).eq(text.bytes().chain([b'\n'])));
    }

    #[test]
    fn bad_input_names_the_file_and_the_place_and_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        let inputs = folder.join("inputs");
        fs::create_dir_all(inputs.join("empty folder")).unwrap();
        let file = |name: &str, bytes: &[u8]| {
            fs::write(inputs.join(name), bytes).unwrap();
            inputs.join(name)
        };
        let long_bad = [vec![b'a'; PIECE_BYTES + 5], vec![0xFF], vec![b'b'; 9]].concat();
        let cases = [
            (file("empty.txt", b""), "empty: expected text"),
            (file("latin1.txt", b"caf\xE9 au lait"), "not UTF-8: the byte at offset 3"),
            (file("cut.txt", b"caf\xC3"), "not UTF-8: the byte at offset 3"),
            (file("long.txt", &long_bad), "not UTF-8: the byte at offset 1048581"),
            (inputs.join("missing.txt"), "cannot open"),
            (inputs.join("empty folder"), "no text in the folder"),
        ];
        for (input, expected) in cases {
            let out = folder.join("out.bin");
            let options = PackOptions { tokenizer: TokenizerKind::Bytes };
            let error =
                pack(std::slice::from_ref(&input), &out, &options, &mut |_| {}).unwrap_err().to_string();
            assert!(error.contains(expected) && error.contains(&input.display().to_string()), "{error}");
            let left: Vec<_> =
                fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name()).collect();
            assert_eq!(left, ["inputs"], "{error}");
        }
        let good = file("good.txt", b"text");
        let options = PackOptions { tokenizer: TokenizerKind::Bytes };
        let out = folder.join("out.bin");
        fs::write(&out, b"precious").unwrap();
        let error = pack(std::slice::from_ref(&good), &out, &options, &mut |_| {}).unwrap_err().to_string();
        assert!(error.contains("exists already") && fs::read(&out).unwrap() == b"precious", "{error}");
        let nowhere = folder.join("no such folder/out.bin");
        assert!(pack(&[good], &nowhere, &options, &mut |_| {}).is_err());
    }

    const BYTES: PackOptions = PackOptions { tokenizer: TokenizerKind::Bytes };

    #[test]
    fn a_byte_order_mark_is_text() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("marked.txt");
        fs::write(&path, "\u{FEFF}text").unwrap();
        let tokens = packed(folder.path(), &[path], TokenizerKind::Bytes).unwrap();
        assert_eq!(tokens, [0xEF, 0xBB, 0xBF, 0x74, 0x65, 0x78, 0x74, 0x0A]);
    }

    #[test]
    fn white_space_longer_than_a_piece_is_packed() {
        let folder = tempfile::tempdir().unwrap();
        let text = "a".to_string() + &" ".repeat(3 * PIECE_BYTES / 2) + "b";
        let path = folder.path().join("space.txt");
        fs::write(&path, &text).unwrap();
        let tokens = packed(folder.path(), &[path], TokenizerKind::Gpt2).unwrap();
        let tokenizer = Tokenizer::new(TokenizerKind::Gpt2).unwrap();
        assert_eq!(tokenizer.decode(&tokens[..tokens.len() - 1]).unwrap(), text.as_bytes());
    }

    #[test]
    fn nothing_to_pack_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().join("out.bin");
        assert!(matches!(pack(&[], &out, &BYTES, &mut |_| {}), Err(PackError::NoInputs { .. })));
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn only_a_description_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let (text, out) = (folder.path().join("text.txt"), folder.path().join("out"));
        fs::write(&text, "text").unwrap();
        fs::write(folder.path().join("out.json"), "{\"mine\": 1}").unwrap();
        let error = pack(std::slice::from_ref(&text), &out, &BYTES, &mut |_| {}).unwrap_err();
        assert!(matches!(error, PackError::SidecarTaken { .. }), "{error}");
        assert_eq!(fs::read(folder.path().join("out.json")).unwrap(), b"{\"mine\": 1}");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
        assert!(matches!(read_sidecar(&out), Err(PackError::Sidecar { .. })));

        fs::remove_file(folder.path().join("out.json")).unwrap();
        assert_eq!(read_sidecar(&out).unwrap(), None);
        pack(std::slice::from_ref(&text), &out, &BYTES, &mut |_| {}).unwrap();
        fs::remove_file(&out).unwrap();
        let options = PackOptions { tokenizer: TokenizerKind::Gpt2 };
        pack(&[text], &out, &options, &mut |_| {}).unwrap();
        assert_eq!(read_sidecar(&out).unwrap().unwrap().tokenizer, TokenizerKind::Gpt2);
    }

    #[test]
    fn a_token_file_that_came_to_be_meanwhile_keeps_its_description() {
        let folder = tempfile::tempdir().unwrap();
        let (text, out) = (folder.path().join("text.txt"), folder.path().join("out"));
        fs::write(&text, "text").unwrap();
        let other = Sidecar {
            tokenizer: TokenizerKind::Gpt2,
            vocabulary: 50257,
            tokens: 3,
            text_bytes: 9,
            documents: 1,
        };
        let meanwhile = &mut |_| {
            fs::write(&out, b"theirs").unwrap();
            write_sidecar(&sidecar_path(&out), &other).unwrap();
        };
        let error = pack(&[text], &out, &BYTES, meanwhile).unwrap_err();
        assert!(matches!(error, PackError::Loader(ebbtide_loader::Error::Exists { .. })), "{error}");
        assert_eq!(read_sidecar(&out).unwrap(), Some(other));
        assert_eq!(fs::read(&out).unwrap(), b"theirs");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 3);
    }
}
