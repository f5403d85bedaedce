//! `ebbtide pack`.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use ebbtide::{
    kernels::bytes,
    pack::{self, PackOptions},
    tokenizer::TokenizerKind,
};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

#[derive(Args)]
pub(crate) struct PackArgs {
    /// Text files (UTF-8), or folders whose .txt and .md files are taken
    #[arg(required = true)]
    inputs: Vec<PathBuf>,
    /// The token file to write
    #[arg(long, short)]
    out: PathBuf,
    /// gpt2 (byte pairs) or bytes
    #[arg(long, default_value_t = TokenizerKind::Gpt2)]
    tokenizer: TokenizerKind,
}

pub(super) fn pack(args: PackArgs) -> Result<()> {
    let total = pack::input_bytes(&args.inputs)?;
    let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr());
    let style = ProgressStyle::with_template("{wide_bar} {bytes}/{total_bytes} {bytes_per_sec} eta {eta}");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    let options = PackOptions { tokenizer: args.tokenizer };
    let report = pack::pack(&args.inputs, &args.out, &options, &mut |done| bar.set_position(done))?;
    bar.finish_and_clear();
    println!(
        "{}: {} tokens from {} of text in {} {}, {:.2} bytes a token",
        report.out.display(),
        report.tokens,
        bytes(report.text_bytes as usize),
        report.files,
        if report.files == 1 { "file" } else { "files" },
        report.text_bytes as f64 / report.tokens.max(1) as f64,
    );
    Ok(())
}
