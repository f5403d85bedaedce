//! Weights and configurations as Hugging Face's `transformers` writes and reads them.

use std::{
    fs::{self, File},
    io::Write,
    path::{Path, PathBuf},
};

use ebbtide_kernels::Slice;
use serde_json::{Value, json};

use crate::{
    Engine, Error, Parameters, Result,
    gpt2::{Gpt2, Gpt2Config},
    parameters::write_flat,
    tensor_file::{self, Entry, TensorFile},
};

const PREFIX: &str = "transformer.";
const HEAD: &str = "lm_head.weight";
const TOKEN_TABLE: &str = "transformer.wte.weight";

/// Writes `model.safetensors` and `config.json` to a folder, for `GPT2LMHeadModel.from_pretrained`. Tensors go by Hugging
/// Face's names and shapes, f32; the head is the token table and is not written twice.
///
/// # Errors
/// [`Error::File`] if the folder holds a model; [`Error::Io`]; the device's.
pub fn export(engine: &Engine, model: &Gpt2, folder: &Path) -> Result<()> {
    let io = |path: &Path, action| {
        let path = path.to_path_buf();
        move |source| Error::Io { path, action, source }
    };
    fs::create_dir_all(folder).map_err(io(folder, "make the folder"))?;
    let (weights, config) = (folder.join("model.safetensors"), folder.join("config.json"));
    for path in [&weights, &config] {
        if path.exists() {
            let message = "exists already, and is not overwritten".to_string();
            return Err(Error::File { path: path.clone(), message });
        }
    }
    tensor_file::write(engine, &weights, entries(model.parameters(), model.parameters().weights(), "")?)?;
    let text = serde_json::to_vec_pretty(&config_json(model.config())).unwrap_or_default();
    let partial = folder.join("config.json.partial");
    let write = || {
        let mut file = File::create(&partial)?;
        file.write_all(&text)?;
        file.sync_all()?;
        fs::rename(&partial, &config)
    };
    write().map_err(io(&config, "write"))
}

/// Every parameter's part of a flat buffer, with `prefix` before the names.
pub(crate) fn entries(parameters: &Parameters, flat: &Slice, prefix: &str) -> Result<Vec<Entry>> {
    let entry = |(name, shape, range): (&str, &[usize], std::ops::Range<usize>)| -> Result<Entry> {
        Ok((format!("{prefix}{name}"), shape.to_vec(), flat.part(range)?))
    };
    parameters.iter().map(entry).collect()
}

fn config_json(config: &Gpt2Config) -> Value {
    let mut value = json!({
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": config.vocabulary,
        "n_positions": config.context,
        "n_ctx": config.context,
        "n_embd": config.width,
        "n_layer": config.layers,
        "n_head": config.heads,
        "n_inner": null,
        "activation_function": if config.exact_gelu { "gelu" } else { "gelu_new" },
        "layer_norm_epsilon": config.epsilon,
        "initializer_range": 0.02,
        "embd_pdrop": config.dropout,
        "attn_pdrop": config.dropout,
        "resid_pdrop": config.dropout,
        "tie_word_embeddings": true,
        "torch_dtype": "float32",
    });
    // Of another vocabulary it is not known which token ends a text; `transformers` would assume 50256.
    let end = if config.vocabulary == 50257 { json!(50256) } else { Value::Null };
    value["bos_token_id"] = end.clone();
    value["eos_token_id"] = end;
    value
}

/// Reads the sizes from a folder's `config.json`.
///
/// # Errors
/// [`Error::Io`]; [`Error::File`] names the key that is missing or not supported; those of [`Gpt2Config::check`].
pub fn read_config(folder: &Path) -> Result<Gpt2Config> {
    let path = folder.join("config.json");
    let text = fs::read(&path).map_err(|source| Error::Io { path: path.clone(), action: "read", source })?;
    let wrong = |message: String| Error::File { path: path.clone(), message };
    let value: Value = serde_json::from_slice(&text).map_err(|error| wrong(error.to_string()))?;
    if value["model_type"] != "gpt2" {
        return Err(wrong(format!("`model_type` is {}: expected \"gpt2\"", value["model_type"])));
    }
    let size = |key: &str| {
        value[key]
            .as_u64()
            .map(|size| size as usize)
            .ok_or_else(|| wrong(format!("`{key}` is {}: expected a whole number", value[key])))
    };
    let exact_gelu = match value["activation_function"].as_str() {
        Some("gelu") => true,
        Some("gelu_new" | "gelu_pytorch_tanh") | None => false,
        Some(other) => {
            return Err(wrong(format!("`activation_function` is `{other}`: expected gelu_new or gelu")));
        }
    };
    let (width, inner) = (size("n_embd")?, value["n_inner"].as_u64());
    if inner.is_some_and(|inner| inner != 4 * width as u64) {
        return Err(wrong(format!("`n_inner` is {}: expected 4 · n_embd or null", value["n_inner"])));
    }
    let config = Gpt2Config {
        vocabulary: size("vocab_size")?,
        context: size("n_positions")?,
        width,
        layers: size("n_layer")?,
        heads: size("n_head")?,
        dropout: 0.0,
        exact_gelu,
        epsilon: value["layer_norm_epsilon"].as_f64().unwrap_or(1e-5) as f32,
    };
    config.check()?;
    Ok(config)
}

/// Loads weights from a `model.safetensors`, or a folder that holds one. Names may lack the `transformer.` prefix, as the
/// published files' do; tensors may be f32, f16 or bf16. Nothing is changed unless everything is there and fits.
///
/// # Errors
/// [`Error::Io`]; [`Error::File`] for a file that is cut short, a tensor that is missing, unknown or of another shape, or a
/// head that is not the token table; the device's.
pub fn load_weights(engine: &Engine, parameters: &Parameters, path: &Path) -> Result<()> {
    let path = if path.is_dir() { path.join("model.safetensors") } else { PathBuf::from(path) };
    let mut file = TensorFile::open(&path)?;
    let names = file.names();
    let prefix = if names.iter().any(|name| name.starts_with(PREFIX)) { "" } else { PREFIX };
    // Masks that older files hold as if they were parameters.
    let is_mask = |name: &str| name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias");
    let of_file = |name: &str| name.strip_prefix(prefix).unwrap_or(name).to_string();
    let shapes: Vec<(String, Vec<usize>)> =
        parameters.iter().map(|(name, shape, _)| (name.to_string(), shape.to_vec())).collect();
    for (name, shape) in &shapes {
        file.check(&of_file(name), shape)?;
    }
    for name in names.iter().filter(|name| *name != HEAD && !is_mask(name)) {
        if !shapes.iter().any(|(known, _)| of_file(known) == *name) {
            return Err(file.wrong(format!("tensor `{name}` is not one of the model's")));
        }
    }
    if names.iter().any(|name| name == HEAD) {
        let (head, table) = (file.read(HEAD)?, file.read(&of_file(TOKEN_TABLE))?);
        let same =
            head.len() == table.len() && head.iter().zip(&table).all(|(a, b)| a.to_bits() == b.to_bits());
        if !same {
            return Err(file.wrong(format!("`{HEAD}` is not the token table: expected a tied head")));
        }
    }
    for (name, _) in &shapes {
        write_flat(engine, &parameters.get(name)?.weight, &file.read(&of_file(name))?)?;
    }
    engine.compute().synchronize()?;
    Ok(())
}
