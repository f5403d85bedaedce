//! `ebbtide data` and `ebbtide bench-loader` as a user meets them.

use std::{fs, path::Path, process::Command};

use serde_json::Value;

/// A folder with a file of the tokens 0, 1, 2, ….
fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let tokens: Vec<u8> = (0..60_001u16).flat_map(u16::to_le_bytes).collect();
    fs::write(folder.path().join("tokens.bin"), tokens).unwrap();
    folder
}

fn run(folder: &Path, arguments: &[&str]) -> Result<String, String> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ebbtide"));
    let output = command.args(arguments).current_dir(folder).output().unwrap();
    let (out, errors) =
        (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
    assert!(!errors.contains("panicked"), "{errors}");
    if output.status.success() { Ok(out) } else { Err(errors) }
}

fn lines(folder: &Path, arguments: &[&str]) -> Vec<Value> {
    let out = run(folder, arguments).unwrap();
    out.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn bench_loader_prints_one_object() {
    let folder = folder();
    for order in ["random", "block"] {
        let arguments = [
            "bench-loader",
            "tokens.bin",
            "--context",
            "16",
            "--order",
            order,
            "--block",
            "4KiB",
            "--window",
            "8",
            "--memory-limit",
            "32MiB",
            "--json",
        ];
        let found = &lines(folder.path(), &arguments)[0];
        for name in [
            "bytes_per_second",
            "raw_sequential_bytes_per_second",
            "windows_per_second",
            "read_amplification",
            "wait_share",
        ] {
            assert!(found[name].as_f64().is_some_and(|value| value > 0.0), "{name}: {found}");
        }
        assert!(cfg!(not(target_os = "linux")) || found["peak_resident_bytes"].as_u64().unwrap() > 0);
        // An epoch, and what of a batch runs on into the next.
        assert_eq!(found["windows"].as_u64().unwrap(), 60_000u64 / 16 / 32 * 32 + 32);
        let held = found["arena_bytes"].as_u64().unwrap() + found["batch_bytes"].as_u64().unwrap();
        assert!(held <= 32 << 20, "{found}");
    }
    let text = run(folder.path(), &["bench-loader", "tokens.bin", "--order", "block"]).unwrap();
    assert!(text.contains("windows/s; raw reads one after another"), "{text}");
    let error =
        run(folder.path(), &["bench-loader", "tokens.bin", "--order", "block", "--memory-limit", "1KiB"]);
    assert!(error.unwrap_err().contains("fewer or smaller blocks need less"));
    let error = run(folder.path(), &["bench-loader", "none.bin"]).unwrap_err();
    assert!(error.contains("none.bin: cannot open"), "{error}");
}

#[test]
fn data_order_lists_what_steps_see() {
    let folder = folder();
    let order = |more: &[&str]| -> Vec<(u64, u64)> {
        let arguments = [
            "data",
            "order",
            "tokens.bin",
            "--context",
            "16",
            "--order",
            "block",
            "--block",
            "4KiB",
            "--json",
        ];
        let found = lines(folder.path(), &[&arguments[..], more].concat());
        let number = |line: &Value, name| line[name].as_u64().unwrap();
        found.iter().map(|line| (number(line, "position"), number(line, "window"))).collect()
    };
    // An epoch has 3750 windows, and each comes once.
    let mut all = order(&["--batch", "3750", "--epoch", "2"]);
    assert_eq!((all[0].0, all.len()), (7500, 3750));
    assert_eq!(order(&["--batch", "10", "--epoch", "2", "--step", "3"]), all[30..40]);
    let mut ranks: Vec<_> = ["0", "1", "2"]
        .iter()
        .flat_map(|rank| order(&["--batch", "3750", "--epoch", "2", "--rank", rank, "--world", "3"]))
        .collect();
    ranks.sort_unstable();
    assert_eq!(ranks, all);
    all.sort_unstable_by_key(|sample| sample.1);
    assert!(all.iter().map(|sample| sample.1).eq(0..3750));
    let text =
        run(folder.path(), &["data", "order", "tokens.bin", "--context", "16", "--batch", "2"]).unwrap();
    assert!(text.starts_with("# 3750 windows an epoch, random order, fingerprint "), "{text}");
    assert_eq!(text.lines().count(), 3);
    let huge = u64::MAX.to_string();
    let error = run(folder.path(), &["data", "order", "tokens.bin", "--context", "16", "--epoch", &huge]);
    assert!(error.unwrap_err().contains("is beyond 2^64"));
}

/// The losses of a run's steps.
fn losses(folder: &Path, name: &str) -> Vec<String> {
    let metrics = fs::read_to_string(folder.join(name).join("metrics.jsonl")).unwrap();
    let lines = metrics.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    lines.map(|line| format!("{} {}", line["step"], line["loss"])).collect()
}

#[test]
fn a_run_in_block_order_goes_on_where_it_was() {
    let folder = folder();
    let config = r#"
[model]
vocabulary = 60001
context = 8
width = 8
layers = 1
heads = 2

[data]
tokens = "tokens.bin"
tokenizer = "bytes"
order = "block"
ram = "80MiB"

[training]
steps = 8
batch = 2
accumulate = 2
checkpoint_every = 1
sample_tokens = 0
validation_windows = 2
"#;
    fs::write(folder.path().join("run.toml"), config).unwrap();
    let train = |more: &[&str]| run(folder.path(), &[&["train", "run.toml"], more].concat());
    train(&["--out", "whole"]).unwrap();
    train(&["--out", "parts", "--steps", "3"]).unwrap();
    // The memory may change, and the order may not.
    let error = train(&["--out", "parts", "--resume", "--order", "random"]).unwrap_err();
    assert!(error.contains(r#"data.order is "block" in the run, "random" asked for"#), "{error}");
    train(&["--out", "parts", "--resume", "--ram", "1GiB"]).unwrap();
    assert_eq!(losses(folder.path(), "parts"), losses(folder.path(), "whole"));
    let state = |name: &str| -> Value {
        let checkpoints = folder.path().join(name).join("checkpoints");
        let last = fs::read_dir(checkpoints).unwrap().map(|entry| entry.unwrap().path()).max().unwrap();
        serde_json::from_slice(&fs::read(last.join("state.json")).unwrap()).unwrap()
    };
    let extra = |name| state(name)["extra"].clone();
    assert_eq!(
        (&extra("parts")["digest"], &extra("parts")["position"]),
        (&extra("whole")["digest"], &32.into())
    );
    assert!(extra("whole")["digest"].as_u64().is_some_and(|digest| digest > 0));
    let summary: Value =
        serde_json::from_slice(&fs::read(folder.path().join("whole/summary.json")).unwrap()).unwrap();
    let held = |name: &str| summary["loader"][name].as_u64().unwrap();
    assert!(held("arena_bytes") + held("batch_bytes") <= held("limit_bytes"));
    assert_eq!(held("limit_bytes"), 80 << 20);
    let error = train(&["--out", "small", "--ram", "1KiB"]).unwrap_err();
    assert!(error.contains("fewer or smaller blocks need less"), "{error}");
}

/// Any format that the loader reads trains; a run's data is known again, file by file.
#[test]
fn runs_read_any_format_and_know_their_data() {
    let folder = tempfile::tempdir().unwrap();
    let config = |tokens: &str| {
        format!(
            "[model]\nvocabulary = 256\ncontext = 8\nwidth = 8\nlayers = 1\nheads = 2\n[data]\ntokens = \"{tokens}\"\n\
             tokenizer = \"bytes\"\n[training]\nsteps = 6\nbatch = 2\nsample_tokens = 0\nvalidation_windows = 2\n"
        )
    };
    let bytes: Vec<u8> = (0..4000u32).flat_map(|i| ((i * i / 7 % 251) as u16).to_le_bytes()).collect();
    // One raw file; the same as an array; the same as a folder of two shards, whose windows do not cross.
    fs::write(folder.path().join("raw.bin"), &bytes).unwrap();
    let header = "{'descr': '<u2', 'fortran_order': False, 'shape': (4000,), }";
    let header = format!("{header:<117}\n");
    let mut array = b"\x93NUMPY\x01\x00".to_vec();
    array.extend((header.len() as u16).to_le_bytes());
    array.extend(header.as_bytes());
    array.extend(&bytes);
    fs::write(folder.path().join("array.npy"), &array).unwrap();
    fs::create_dir(folder.path().join("shards")).unwrap();
    fs::write(folder.path().join("shards/a.bin"), &bytes[..4000]).unwrap();
    fs::write(folder.path().join("shards/b.bin"), &bytes[4000..]).unwrap();
    for tokens in ["raw.bin", "array.npy", "shards"] {
        fs::write(folder.path().join("run.toml"), config(tokens)).unwrap();
        let out = tokens.replace('.', "-");
        run(folder.path(), &["train", "run.toml", "--out", &out, "--steps", "3"]).unwrap();
        assert_eq!(losses(folder.path(), &out).len(), 3, "{tokens}");
        run(folder.path(), &["eval", &out]).unwrap();
    }
    // A shard that changed is named, and gone on with only where that is asked for.
    let mut changed = bytes[4000..].to_vec();
    changed[11] ^= 1;
    fs::write(folder.path().join("shards/b.bin"), &changed).unwrap();
    let error = run(folder.path(), &["train", "--out", "shards", "--resume", "--steps", "6"]).unwrap_err();
    assert!(error.contains("b.bin") && error.contains("--accept-changed-data"), "{error}");
    run(folder.path(), &["train", "--out", "shards", "--resume", "--steps", "6", "--accept-changed-data"])
        .unwrap();
    assert_eq!(losses(folder.path(), "shards").len(), 6);
    // A token outside of the vocabulary is named wherever it is.
    fs::write(folder.path().join("run.toml"), config("raw.bin")).unwrap();
    let mut beyond = bytes.clone();
    beyond[2001] = 7;
    fs::write(folder.path().join("raw.bin"), &beyond).unwrap();
    let error = run(folder.path(), &["train", "run.toml", "--out", "beyond"]).unwrap_err();
    assert!(error.contains("raw.bin") && error.contains("1000"), "{error}");
}

#[test]
fn sums_are_made_once_and_name_what_is_damaged() {
    let folder = folder();
    let sums =
        |arguments: &[&str]| run(folder.path(), &[&["data", "sums", "tokens.bin"], arguments].concat());
    let made = sums(&[]).unwrap();
    assert!(made.contains("0 B were as their checksums say, 117.2 KiB have checksums now"), "{made}");
    assert!(folder.path().join("tokens.bin.sums").exists());
    let again = sums(&[]).unwrap();
    assert!(again.contains("117.2 KiB were as their checksums say, 0 B have checksums now"), "{again}");
    fs::create_dir(folder.path().join("sums")).unwrap();
    sums(&["--folder", "sums"]).unwrap();
    assert!(folder.path().join("sums/tokens.bin.sums").exists());
    let mut tokens = fs::read(folder.path().join("tokens.bin")).unwrap();
    tokens[5000] ^= 1;
    fs::write(folder.path().join("tokens.bin"), tokens).unwrap();
    let error = sums(&[]).unwrap_err();
    assert!(error.contains("tokens.bin: changed since its checksums were made"), "{error}");
}

#[test]
fn shuffle_says_how_an_order_mixes() {
    let folder = folder();
    let arguments = [
        "data",
        "shuffle",
        "tokens.bin",
        "--context",
        "16",
        "--order",
        "block",
        "--block",
        "4KiB",
        "--window",
        "4",
    ];
    let text = run(folder.path(), &arguments).unwrap();
    // 128 windows a block, 4 blocks in as many streams; tokens that count up are as sorted as can be.
    assert!(text.contains("a sample is mixed with "), "{text}");
    assert!(text.contains("warning: the data looks sorted (2 runs"), "{text}");
    let found = &lines(folder.path(), &[&arguments[..], &["--json"]].concat())[0];
    assert_eq!(found["runs"], 2);
    let random = run(folder.path(), &["data", "shuffle", "tokens.bin", "--context", "16"]).unwrap();
    assert!(!random.contains("warning"), "{random}");
}

#[test]
fn training_makes_checksums_and_sets_damaged_samples_aside() {
    let folder = tempfile::tempdir().unwrap();
    // More than the fingerprint reads whole; a page that it does not read is then damaged.
    let mut tokens: Vec<u8> = (0..600_000u32).flat_map(|i| ((i % 251) as u16).to_le_bytes()).collect();
    fs::write(folder.path().join("tokens.bin"), &tokens).unwrap();
    let config = |more: &str| {
        let text = format!(
            "[model]\nvocabulary = 256\ncontext = 64\nwidth = 8\nlayers = 1\nheads = 1\n[data]\ntokens = \"tokens.bin\"\n\
             tokenizer = \"bytes\"\norder = \"block\"\n{more}[training]\nsteps = 300\nbatch = 32\nvalidate_every = 0\n\
             sample_tokens = 0\ncheckpoint_every = 0\n"
        );
        fs::write(folder.path().join("run.toml"), text).unwrap();
    };
    let train = |out: &str| run(folder.path(), &["train", "run.toml", "--out", out]);
    let summary = |out: &str| -> Value {
        serde_json::from_slice(&fs::read(folder.path().join(out).join("summary.json")).unwrap()).unwrap()
    };
    config("checksums = \"make\"\n");
    train("made").unwrap();
    assert!(summary("made")["loader"]["summed_bytes"].as_u64().unwrap() > 1_000_000);
    assert!(folder.path().join("tokens.bin.sums").exists());
    tokens[7 * 4096 + 100] ^= 2;
    fs::write(folder.path().join("tokens.bin"), &tokens).unwrap();
    config("");
    let error = train("stopped").unwrap_err();
    assert!(error.contains("tokens.bin: page 7 of 4096 bytes at byte offset 28672 is damaged"), "{error}");
    config("damaged = \"quarantine\"\n");
    train("quarantined").unwrap();
    let loader = &summary("quarantined")["loader"];
    // 32 windows of 64 tokens, and those that reach over its ends.
    assert!((30..=40).contains(&loader["quarantined_samples"].as_u64().unwrap()), "{loader}");
}
