//! Weights and configurations as Hugging Face's `transformers` writes and reads them.

use std::{
    fs::{self, File},
    io::Write,
    path::{Path, PathBuf},
};

use serde_json::{Value, json};

use crate::{
    Engine, Error, Flat, Parameters, Result,
    gpt2::{Gpt2, Gpt2Config},
    tensor_file::{self, Entry, TensorFile},
};

const PREFIX: &str = "transformer.";
const HEAD: &str = "lm_head.weight";
const TOKEN_TABLE: &str = "transformer.wte.weight";

/// Writes `model.safetensors` and `config.json` to a folder, for `GPT2LMHeadModel.from_pretrained`. Tensors go by Hugging
/// Face's names and shapes, f32; the head is the token table and is not written twice. Both are written under other names
/// and renamed, `model.safetensors` last: where it is, the export is whole.
///
/// # Errors
/// [`Error::File`] if the folder holds a model; [`Error::Io`]; the device's. Nothing is left of the attempt then.
pub fn export(engine: &Engine, model: &Gpt2, folder: &Path) -> Result<()> {
    fs::create_dir_all(folder).map_err(io(folder, "make the folder"))?;
    let [weights, config] = ["model.safetensors", "config.json"].map(|name| folder.join(name));
    for path in [&weights, &config] {
        if path.exists() {
            let message = "exists already, and is not overwritten".to_string();
            return Err(Error::File { path: path.clone(), message });
        }
    }
    let [weights_partial, config_partial] =
        ["model.safetensors.partial", "config.json.partial"].map(|name| folder.join(name));
    let write = || {
        write_config(&config_partial, model.config())?;
        let parameters = model.parameters();
        tensor_file::write(engine, &weights_partial, entries(parameters, parameters.weights(), ""))?;
        fs::rename(&config_partial, &config).map_err(io(&config, "put in place"))?;
        fs::rename(&weights_partial, &weights).map_err(|reason| {
            let _ = fs::remove_file(&config);
            io(&weights, "put in place")(reason)
        })
    };
    write().inspect_err(|_| {
        for path in [&weights_partial, &config_partial] {
            let _ = fs::remove_file(path);
        }
    })
}

fn write_config(path: &Path, config: &Gpt2Config) -> Result<()> {
    let text = serde_json::to_vec_pretty(&config_json(config))
        .map_err(|error| Error::File { path: path.to_path_buf(), message: error.to_string() })?;
    let write = || {
        let mut file = File::create(path)?;
        file.write_all(&text)?;
        file.sync_all()
    };
    write().map_err(io(path, "write"))
}

fn io(path: &Path, action: &'static str) -> impl FnOnce(std::io::Error) -> Error {
    let path = path.to_path_buf();
    move |reason| Error::Io { path, action, reason }
}

/// Every parameter's part of a flat buffer, with `prefix` before the names.
pub(crate) fn entries(parameters: &Parameters, flat: &Flat, prefix: &str) -> Vec<Entry> {
    let entries = parameters.iter();
    entries
        .map(|(name, shape, range)| (format!("{prefix}{name}"), shape.to_vec(), (flat.clone(), range)))
        .collect()
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

/// Reads the sizes from a folder's `config.json`. Its dropout is not taken over: how to train is not the model's to say.
///
/// # Errors
/// [`Error::Io`]; [`Error::File`] names the key that is missing or not supported; those of [`Gpt2Config::check`].
pub fn read_config(folder: &Path) -> Result<Gpt2Config> {
    let path = folder.join("config.json");
    let text = fs::read(&path).map_err(|reason| Error::Io { path: path.clone(), action: "read", reason })?;
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
    // Keys that change what the model computes, and the one value that this one computes: `transformers`' default.
    let fixed = [
        ("tie_word_embeddings", true),
        ("scale_attn_weights", true),
        ("scale_attn_by_inverse_layer_idx", false),
        ("add_cross_attention", false),
    ];
    for (key, expected) in fixed {
        if !value[key].is_null() && value[key] != expected {
            return Err(wrong(format!("`{key}` is {}: expected {expected}", value[key])));
        }
    }
    let epsilon = match &value["layer_norm_epsilon"] {
        Value::Null => 1e-5,
        found => {
            let epsilon = found.as_f64().filter(|epsilon| *epsilon > 0.0);
            epsilon.ok_or_else(|| {
                wrong(format!("`layer_norm_epsilon` is {found}: expected a positive number"))
            })?
        }
    };
    let config = Gpt2Config {
        vocabulary: size("vocab_size")?,
        context: size("n_positions")?,
        width,
        layers: size("n_layer")?,
        heads: size("n_head")?,
        dropout: 0.0,
        exact_gelu,
        epsilon: epsilon as f32,
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
    for (name, _, range) in parameters.iter() {
        parameters.weights().write(engine, range, &file.read(&of_file(name))?)?;
    }
    parameters.refresh(engine)?;
    engine.compute().synchronize()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use ebbtide_kernels::Device;
    use ebbtide_offload::{OffloadOptions, policy::Builtin};

    use super::*;

    const CONFIG: Gpt2Config = Gpt2Config {
        vocabulary: 13,
        context: 8,
        width: 8,
        layers: 2,
        heads: 2,
        dropout: 0.0,
        exact_gelu: false,
        epsilon: 1e-5,
    };

    fn model(seed: u64) -> (Engine, Gpt2) {
        let device = Device::cpu().unwrap();
        let engine = Engine::new(&device, Builtin::Keep.policy(), OffloadOptions::default()).unwrap();
        let model = Gpt2::new(&engine, CONFIG, seed, false).unwrap();
        (engine, model)
    }

    fn bits((engine, model): &(Engine, Gpt2)) -> Vec<u32> {
        let values = model.parameters().weights().to_vec(engine).unwrap();
        values.into_iter().map(f32::to_bits).collect()
    }

    fn names(folder: &Path) -> Vec<String> {
        let mut names: Vec<String> =
            fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    /// A model's tensors as a file that somebody else wrote: `name` and `dtype` as given, and others beside.
    fn write_as(
        path: &Path,
        (engine, model): &(Engine, Gpt2),
        name: impl Fn(&str) -> String,
        dtype: safetensors::Dtype,
        more: &[(&str, Vec<f32>)],
    ) {
        let encode = |values: &[f32]| -> Vec<u8> {
            match dtype {
                safetensors::Dtype::F16 => {
                    values.iter().flat_map(|&x| half::f16::from_f32(x).to_le_bytes()).collect()
                }
                safetensors::Dtype::BF16 => {
                    values.iter().flat_map(|&x| half::bf16::from_f32(x).to_le_bytes()).collect()
                }
                _ => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
            }
        };
        let mut tensors = Vec::new();
        for (parameter, shape, range) in model.parameters().iter() {
            let values = model.parameters().weights().read(engine, range).unwrap();
            tensors.push((name(parameter), shape.to_vec(), encode(&values)));
        }
        let flat = |(name, values): &(&str, Vec<f32>)| (name.to_string(), vec![values.len()], encode(values));
        tensors.extend(more.iter().map(flat));
        let views = tensors.iter().map(|(name, shape, data)| {
            (name, safetensors::tensor::TensorView::new(dtype, shape.clone(), data).unwrap())
        });
        safetensors::serialize_to_file(views, None, path).unwrap();
    }

    #[test]
    fn failed_exports_leave_nothing_and_exports_are_not_overwritten() {
        for blocked in ["config.json.partial", "model.safetensors.partial"] {
            let folder = tempfile::tempdir().unwrap();
            fs::create_dir(folder.path().join(blocked)).unwrap();
            let (engine, model) = model(1);
            export(&engine, &model, folder.path()).unwrap_err();
            assert_eq!(names(folder.path()), [blocked]);
            fs::remove_dir(folder.path().join(blocked)).unwrap();
            export(&engine, &model, folder.path()).unwrap();
            assert_eq!(names(folder.path()), ["config.json", "model.safetensors"]);
            let error = export(&engine, &model, folder.path()).unwrap_err().to_string();
            assert!(error.contains("model.safetensors: exists already"), "{error}");
        }
    }

    #[test]
    fn files_of_other_writers_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        let source = model(1);
        let bare = |name: &str| name.strip_prefix(PREFIX).unwrap().to_string();
        let masks = [("h.0.attn.bias", vec![1.0; 64]), ("h.1.attn.masked_bias", vec![-1e4])];
        write_as(&path, &source, bare, safetensors::Dtype::F32, &masks);
        let target = model(2);
        load_weights(&target.0, target.1.parameters(), folder.path()).unwrap();
        assert_eq!(bits(&target), bits(&source));

        // Half precision is widened exactly: loaded again, what was rounded once is the same.
        for dtype in [safetensors::Dtype::F16, safetensors::Dtype::BF16] {
            let round = |x: f32| match dtype {
                safetensors::Dtype::F16 => half::f16::from_f32(x).to_f32(),
                _ => half::bf16::from_f32(x).to_f32(),
            };
            write_as(&path, &source, str::to_string, dtype, &[]);
            let target = model(2);
            load_weights(&target.0, target.1.parameters(), &path).unwrap();
            let expected: Vec<u32> =
                bits(&source).into_iter().map(|x| round(f32::from_bits(x)).to_bits()).collect();
            assert_eq!(bits(&target), expected);
        }
    }

    #[test]
    fn only_a_tied_head_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        let source = model(1);
        let table = source.1.parameters().get(TOKEN_TABLE).unwrap().value;
        let mut head = source.0.compute().download::<f32>(&table).unwrap();
        write_as(&path, &source, str::to_string, safetensors::Dtype::F32, &[(HEAD, head.clone())]);
        let target = model(2);
        load_weights(&target.0, target.1.parameters(), &path).unwrap();
        assert_eq!(bits(&target), bits(&source));

        head[3] = f32::from_bits(head[3].to_bits() ^ 1);
        write_as(&path, &source, str::to_string, safetensors::Dtype::F32, &[(HEAD, head)]);
        let target = model(2);
        let before = bits(&target);
        let error = load_weights(&target.0, target.1.parameters(), &path).unwrap_err().to_string();
        assert!(error.contains("model.safetensors: `lm_head.weight` is not the token table"), "{error}");
        assert_eq!(bits(&target), before);
    }

    #[test]
    fn tensors_that_do_not_fit_change_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        let (source, target) = (model(1), model(2));
        let before = bits(&target);
        let check = |expected: &str| {
            let error = load_weights(&target.0, target.1.parameters(), &path).unwrap_err().to_string();
            assert!(error.contains("model.safetensors: ") && error.contains(expected), "{error}");
            assert_eq!(bits(&target), before);
        };
        let renamed = |name: &str| name.replace("ln_f.bias", "ln_f.offset");
        write_as(&path, &source, renamed, safetensors::Dtype::F32, &[]);
        check("no tensor `transformer.ln_f.bias`");
        write_as(&path, &source, str::to_string, safetensors::Dtype::F32, &[("extra", vec![0.0])]);
        check("tensor `extra` is not one of the model's");
        let device = Device::cpu().unwrap();
        let engine = Engine::new(&device, Builtin::Keep.policy(), OffloadOptions::default()).unwrap();
        let wider = Gpt2::new(&engine, Gpt2Config { context: 9, ..CONFIG }, 1, false).unwrap();
        write_as(&path, &(engine, wider), str::to_string, safetensors::Dtype::F32, &[]);
        check("tensor `transformer.wpe.weight` has the shape [9, 8], the model's is [8, 8]");

        write_as(&path, &source, str::to_string, safetensors::Dtype::F32, &[]);
        let whole = fs::read(&path).unwrap();
        for len in [0, 7, 8, 100, whole.len() - 1] {
            fs::write(&path, &whole[..len]).unwrap();
            check("cut short");
        }
    }

    #[test]
    fn configurations_come_back_and_others_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        for exact_gelu in [false, true] {
            let config = Gpt2Config { exact_gelu, epsilon: 1e-6, ..CONFIG };
            write_config(&folder.path().join("config.json"), &config).unwrap();
            assert_eq!(read_config(folder.path()).unwrap(), config);
        }
        let cases = [
            ("model_type", json!("llama")),
            ("n_embd", json!("8")),
            ("n_inner", json!(9)),
            ("activation_function", json!("relu")),
            ("layer_norm_epsilon", json!("1e-5")),
            ("tie_word_embeddings", json!(false)),
            ("scale_attn_weights", json!(false)),
            ("scale_attn_by_inverse_layer_idx", json!(true)),
            ("add_cross_attention", json!(true)),
        ];
        for (key, value) in cases {
            let mut config = config_json(&CONFIG);
            config[key] = value;
            fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
            let error = read_config(folder.path()).unwrap_err().to_string();
            assert!(error.contains("config.json: ") && error.contains(&format!("`{key}` is ")), "{error}");
        }
    }

    #[test]
    fn only_the_published_vocabulary_has_a_known_end() {
        let end = |vocabulary| config_json(&Gpt2Config { vocabulary, ..CONFIG })["eos_token_id"].clone();
        assert_eq!((end(50257), end(13)), (json!(50256), Value::Null));
    }
}
