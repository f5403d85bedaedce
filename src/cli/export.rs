//! `ebbtide export`.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use ebbtide::engine::hugging_face;

use super::run::{RunFolder, open_model};

#[derive(Args)]
pub(crate) struct ExportArgs {
    /// A run's folder
    run: PathBuf,
    /// The folder for `model.safetensors` and `config.json`
    dir: PathBuf,
}

pub(super) fn export(args: ExportArgs) -> Result<()> {
    let folder = RunFolder::new(args.run);
    let config = folder.config()?;
    let (engine, model) = open_model(&folder, &config)?;
    hugging_face::export(&engine, &model, &args.dir)?;
    println!(
        "{}: model.safetensors and config.json, from {}",
        args.dir.display(),
        folder.latest()?.display()
    );
    Ok(())
}
