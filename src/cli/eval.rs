//! `ebbtide eval`.

use std::path::PathBuf;

use anyhow::{Result, bail};
use clap::Args;
use ebbtide::{
    engine::{Batch, Evaluator},
    loader::Dataset,
    pack::read_sidecar,
};
use indicatif::{ProgressBar, ProgressDrawTarget};

use super::{
    run::{RunFolder, open_model},
    warn_if_unoptimised,
};

#[derive(Args)]
pub(crate) struct EvalArgs {
    /// A run's folder
    run: PathBuf,
    /// A token file, rather than the run's validation data
    #[arg(long)]
    tokens: Option<PathBuf>,
    /// At most as many windows, from the first on
    #[arg(long)]
    windows: Option<u64>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub(super) fn eval(args: EvalArgs) -> Result<()> {
    warn_if_unoptimised();
    let folder = RunFolder::new(args.run);
    let config = folder.config()?;
    let windows = match &args.tokens {
        Some(path) => {
            let dataset = Dataset::open(path)?;
            dataset.check_vocabulary(config.model.vocabulary, u64::MAX)?;
            let tokenizer = config.data.tokenizer;
            if let Some(sidecar) = read_sidecar(path)?.filter(|sidecar| sidecar.tokenizer != tokenizer) {
                bail!(
                    "{}: holds tokens of `{}`: the run's are of `{tokenizer}`",
                    path.display(),
                    sidecar.tokenizer
                );
            }
            dataset.samples(0..dataset.len(), config.training.context)?
        }
        None => folder.data(&config)?.validation,
    };
    let (engine, model) = open_model(&folder, &config)?;
    let mut evaluator = Evaluator::new(&engine)?;
    let count = args.windows.map_or(windows.count(), |most| most.min(windows.count()));
    let bar = ProgressBar::with_draw_target(Some(count), ProgressDrawTarget::stderr());
    let (context, most) = (windows.context(), config.training.batch as u64);
    let (mut total, mut done) = (0.0, 0);
    while done < count {
        let sequences = most.min(count - done) as usize;
        let len = sequences * context;
        let mut batch = Batch { tokens: vec![0; len], targets: vec![0; len], batch: sequences, context };
        let slots = batch.tokens.chunks_mut(context).zip(batch.targets.chunks_mut(context));
        for (index, (tokens, targets)) in (done..).zip(slots) {
            windows.read(index, tokens, targets)?;
        }
        let loss = evaluator.evaluate(&engine, &model, std::slice::from_ref(&batch))?;
        total += f64::from(loss) * sequences as f64;
        done += sequences as u64;
        bar.set_position(done);
    }
    bar.finish_and_clear();
    let loss = if count > 0 { total / count as f64 } else { f64::NAN };
    let tokens = count * context as u64;
    if args.json {
        println!("{}", serde_json::json!({ "loss": loss, "perplexity": loss.exp(), "tokens": tokens }));
    } else {
        println!("loss {loss:.4} nats a token, perplexity {:.3}, over {tokens} tokens", loss.exp());
    }
    Ok(())
}
