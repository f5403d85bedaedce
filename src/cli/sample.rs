//! `ebbtide sample`.

use std::{
    io::{ErrorKind, Write, stdout},
    path::PathBuf,
};

use anyhow::{Context, Result, bail};
use clap::Args;
use ebbtide::{
    engine::generate::{SampleOptions, generate},
    tokenizer::Tokenizer,
};

use super::{
    run::{RunFolder, open_model},
    warn_if_unoptimised,
};

#[derive(Args)]
pub(crate) struct SampleArgs {
    /// A run's folder
    run: PathBuf,
    /// What the model goes on from
    #[arg(long, default_value = "\n")]
    prompt: String,
    /// Tokens to write
    #[arg(long, default_value_t = 300)]
    tokens: usize,
    /// Below 1 the likely become likelier; 0 takes the likeliest every time
    #[arg(long, default_value_t = 0.8, allow_negative_numbers = true)]
    temperature: f32,
    /// Draw from as many of the likeliest alone; 0 for all
    #[arg(long, default_value_t = 40)]
    top_k: usize,
    /// The same seed writes the same text
    #[arg(long, default_value_t = 1337)]
    seed: u64,
}

pub(super) fn sample(args: SampleArgs) -> Result<()> {
    warn_if_unoptimised();
    let options = SampleOptions {
        tokens: args.tokens,
        temperature: args.temperature,
        top_k: args.top_k,
        seed: args.seed,
    };
    options.check()?;
    let folder = RunFolder::new(args.run);
    let config = folder.config()?;
    let tokenizer = Tokenizer::new(config.data.tokenizer)?;
    let prompt: Vec<u32> = tokenizer.encode(&args.prompt).into_iter().map(u32::from).collect();
    if prompt.is_empty() {
        bail!("--prompt: expected some text, found none");
    }
    let (engine, model) = open_model(&folder, &config)?;
    let mut text = Utf8Stream::default();
    let mut failed = show(&args.prompt).err();
    generate(&engine, &model, &prompt, &options, &mut |token| {
        let bytes = u16::try_from(token).ok().and_then(|token| tokenizer.decode(&[token]).ok());
        let shown = text.push(&bytes.unwrap_or_else(|| "\u{FFFD}".as_bytes().to_vec()));
        let ends = tokenizer.end_of_text().map(u32::from) == Some(token);
        failed = failed.take().or_else(|| show(&shown).err());
        failed.is_none() && !ends
    })?;
    match failed.or_else(|| show(&(text.finish() + "\n")).err()) {
        // Whoever closes the pipe has read enough.
        Some(error) if error.kind() != ErrorKind::BrokenPipe => Err(error).context("cannot write the text"),
        _ => Ok(()),
    }
}

fn show(text: &str) -> std::io::Result<()> {
    stdout().write_all(text.as_bytes())?;
    stdout().flush()
}

/// Bytes to text as they come: a character that is cut in two waits for its rest.
#[derive(Default)]
struct Utf8Stream(Vec<u8>);

impl Utf8Stream {
    fn push(&mut self, bytes: &[u8]) -> String {
        self.0.extend_from_slice(bytes);
        let mut text = String::new();
        loop {
            match std::str::from_utf8(&self.0) {
                Ok(valid) => {
                    text.push_str(valid);
                    self.0.clear();
                    return text;
                }
                Err(error) => {
                    let valid = error.valid_up_to();
                    text.push_str(&String::from_utf8_lossy(&self.0[..valid]));
                    let Some(bad) = error.error_len() else {
                        self.0.drain(..valid);
                        return text;
                    };
                    text.push('\u{FFFD}');
                    self.0.drain(..valid + bad);
                }
            }
        }
    }

    fn finish(self) -> String {
        String::from_utf8_lossy(&self.0).into_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn characters_in_pieces_come_out_whole() {
        let bytes = "aé€\u{1F30A}b".as_bytes();
        for split in 0..=bytes.len() {
            let mut stream = Utf8Stream::default();
            let text = stream.push(&bytes[..split]) + &stream.push(&bytes[split..]);
            assert_eq!(text + &stream.finish(), "aé€\u{1F30A}b");
        }
        let mut stream = Utf8Stream::default();
        assert_eq!(stream.push(b"a\xFFb\xC3") + &stream.finish(), "a\u{FFFD}b\u{FFFD}");
    }
}
