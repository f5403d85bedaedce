//! The command line as a user meets it.

use std::{
    fs,
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
};

use serde_json::Value;

/// A folder with a token file and a configuration that trains in a second.
struct Place(tempfile::TempDir);

const CONFIG: &str = r#"
[model]
vocabulary = 256
context = 16
width = 16
layers = 2
heads = 2
dropout = 0.1

[data]
tokens = "corpus.bin"
tokenizer = "bytes"
validation_fraction = 0.2

[training]
steps = 20
batch = 3
accumulate = 2
checkpoint_every = 5
validate_every = 2
validation_windows = 4
sample_tokens = 8
"#;

impl Place {
    fn new() -> Self {
        let place = Place(tempfile::tempdir().unwrap());
        let text = "The quick brown fox jumps over the lazy dog, and the dog sleeps on.\n".repeat(40);
        let tokens: Vec<u8> = text.bytes().flat_map(|byte| u16::from(byte).to_le_bytes()).collect();
        fs::write(place.path("corpus.bin"), tokens).unwrap();
        fs::write(place.path("run.toml"), CONFIG).unwrap();
        place
    }

    /// With a model whose activations are large enough to leave the device.
    fn wide() -> Self {
        let place = Self::new();
        let wide = CONFIG
            .replace("context = 16\nwidth = 16\nlayers = 2", "context = 128\nwidth = 96\nlayers = 5")
            .replace("batch = 3", "batch = 6")
            .replace("validation_windows = 4", "validation_windows = 1");
        fs::write(place.path("run.toml"), wide).unwrap();
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ebbtide"));
        command.args(arguments).current_dir(self.0.path());
        command
    }

    fn run(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().unwrap()
    }

    fn succeed(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    /// The error of a command that must fail, in one line.
    fn fail(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        let errors = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success(), "{arguments:?} did not fail");
        assert!(!errors.contains("panicked"), "{errors}");
        errors
    }

    /// Begins a run, and waits until it has done a step.
    fn begin(&self, arguments: &[&str], step: u64) -> Child {
        let mut child =
            self.command(arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let reached = lines.by_ref().any(|line| line.unwrap().starts_with(&format!("step {step}/")));
        assert!(reached, "the run ended before step {step}");
        // What is left must be read, or the run may stand in a full pipe.
        std::thread::spawn(move || lines.for_each(drop));
        child
    }

    fn metrics(&self, run: &str) -> Vec<Value> {
        let text = fs::read_to_string(self.path(run).join("metrics.jsonl")).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    fn end(&self, run: &str) -> End {
        let last = self.path(run).join("checkpoints/step-000020");
        let read = |name: &str| fs::read(last.join(name)).unwrap();
        let state: Value = serde_json::from_slice(&read("state.json")).unwrap();
        let losses = self
            .metrics(run)
            .into_iter()
            .map(|line| [line["step"].clone(), line["loss"].clone(), line["validation_loss"].clone()]);
        End {
            weights: read("weights.safetensors"),
            optimizer: read("optimizer.safetensors"),
            position: state["extra"]["position"].clone(),
            losses: losses.collect(),
        }
    }
}

/// All that makes a run: the last weights and moments, the place in the data, and every loss.
#[derive(PartialEq)]
struct End {
    weights: Vec<u8>,
    optimizer: Vec<u8>,
    position: Value,
    losses: Vec<[Value; 3]>,
}

#[test]
fn a_run_that_stops_and_goes_on_ends_where_an_unbroken_one_does() {
    let place = Place::new();
    place.succeed(&["train", "run.toml", "--out", "unbroken"]);
    let expected = place.end("unbroken");
    let steps: Vec<u64> = expected.losses.iter().filter_map(|line| line[0].as_u64()).collect();
    assert_eq!(steps, (1..=20).collect::<Vec<_>>());
    let loss = |step: usize| expected.losses[step - 1][1].as_f64().unwrap();
    assert!(loss(20) < loss(1), "nothing was learnt");

    // Stopped by its own end, and under another policy and thread count after.
    place.succeed(&["train", "run.toml", "--out", "short", "--steps", "10"]);
    place.succeed(&[
        "train",
        "--out",
        "short",
        "--steps",
        "20",
        "--resume",
        "--policy",
        "offload",
        "--threads",
        "1",
    ]);
    assert!(place.end("short") == expected);
    // What was asked for last is what the run has now: there is no more to do.
    let said = place.succeed(&["train", "--out", "short", "--resume"]);
    assert!(said.contains("at step 20 of 20 already"), "{said}");
    assert!(place.end("short") == expected);

    // Killed, between checkpoints and without warning.
    for step in [2, 8, 14] {
        let run = format!("killed{step}");
        let mut child = place.begin(&["train", "run.toml", "--out", &run], step);
        child.kill().unwrap();
        child.wait().unwrap();
        place.succeed(&["train", "--out", &run, "--resume"]);
        assert!(place.end(&run) == expected, "killed at step {step}");
    }
}

#[cfg(unix)]
#[test]
fn control_c_saves_and_ends_well() {
    let place = Place::new();
    // Long enough that the signal comes first.
    place.succeed(&["train", "run.toml", "--out", "unbroken"]);
    let long = ["train", "run.toml", "--out", "stopped", "--steps", "100000", "--checkpoint-every", "0"];
    let child = place.begin(&long, 6);
    Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success());
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(said.contains("go on with: ebbtide train --out stopped --resume"), "{said}");
    let done = place.metrics("stopped").len() as u64;
    assert!((6..100_000).contains(&done));
    assert!(place.path("stopped").join(format!("checkpoints/step-{done:06}")).is_dir());
    if done < 20 {
        place.succeed(&["train", "--out", "stopped", "--resume", "--steps", "20"]);
        assert!(place.end("stopped") == place.end("unbroken"));
    }
}

#[test]
fn text_becomes_a_model_that_writes() {
    let place = Place::new();
    let text = "In the beginning was the word. ".repeat(300);
    fs::create_dir(place.path("texts")).unwrap();
    fs::write(place.path("texts/one.txt"), &text).unwrap();
    let said = place.succeed(&["pack", "texts", "--out", "packed.bin", "--tokenizer", "bytes"]);
    assert!(said.contains("9301 tokens"), "{said}");
    let config = CONFIG.replace("corpus.bin", "packed.bin").replace("tokenizer = \"bytes\"\n", "");
    fs::write(place.path("packed.toml"), config).unwrap();
    let said = place.succeed(&["train", "packed.toml", "--out", "run"]);
    assert!(said.contains("unigram entropy") && said.contains("validation loss"), "{said}");

    for line in place.metrics("run") {
        for key in ["step", "loss", "tokens_per_second", "device_bytes", "peak_device_bytes"] {
            assert!(line[key].is_number(), "{key} in {line}");
        }
    }
    let summary: Value = serde_json::from_slice(&fs::read(place.path("run/summary.json")).unwrap()).unwrap();
    let eval: Value = serde_json::from_str(&place.succeed(&["eval", "run", "--json"])).unwrap();
    // Over all windows rather than the four that training looks at.
    assert!((eval["loss"].as_f64().unwrap() - summary["validation_loss"].as_f64().unwrap()).abs() < 0.2);
    let eval: Value =
        serde_json::from_str(&place.succeed(&["eval", "run", "--json", "--tokens", "packed.bin"])).unwrap();
    assert_eq!(eval["tokens"], 9300 / 16 * 16);

    // A reader that has enough closes the pipe.
    let mut child = place
        .command(&["sample", "run", "--prompt", "In the", "--tokens", "200"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success() && !String::from_utf8_lossy(&output.stderr).contains("panicked"));
    assert!(place.fail(&["sample", "run", "--temperature", "-1"]).contains("temperature: expected a finite"));
    // Bytes are no byte pairs.
    place.succeed(&["pack", "texts", "--out", "pairs.bin"]);
    fs::write(place.path("pairs.bin"), [7u8, 0].repeat(100)).unwrap();
    let error = place.fail(&["eval", "run", "--tokens", "pairs.bin"]);
    assert!(error.contains("holds tokens of `gpt2`: the run's are of `bytes`"), "{error}");

    let sample = ["sample", "run", "--prompt", "In the", "--tokens", "20", "--seed", "3"];
    let written = place.succeed(&sample);
    assert!(written.starts_with("In the") && written.chars().count() > 20, "{written}");
    assert_eq!(written, place.succeed(&sample));
    let greedy =
        place.succeed(&["sample", "run", "--prompt", "In the", "--tokens", "5", "--temperature", "0"]);
    assert_eq!(
        greedy,
        place.succeed(&["sample", "run", "--prompt", "In the", "--tokens", "5", "--top-k", "1"])
    );

    place.succeed(&["export", "run", "exported"]);
    let exported: Value =
        serde_json::from_slice(&fs::read(place.path("exported/config.json")).unwrap()).unwrap();
    assert_eq!((&exported["n_embd"], &exported["model_type"]), (&16.into(), &"gpt2".into()));
    assert!(place.fail(&["export", "run", "exported"]).contains("exists already"));

    // The export is where another run may start.
    let config = CONFIG.replace("[model]", "[model]\nweights = \"exported\"");
    fs::write(place.path("again.toml"), config).unwrap();
    place.succeed(&["train", "again.toml", "--out", "again", "--steps", "1"]);
    let first = |run: &str| place.metrics(run)[0]["loss"].as_f64().unwrap();
    assert!(first("again") < first("run"));
}

#[test]
fn bad_configurations_are_errors() {
    let place = Place::new();
    let config = |text: &str| fs::write(place.path("bad.toml"), text).unwrap();
    let cases: &[(&str, &str, &[&str])] = &[
        ("width = 16", "widht = 16", &["bad.toml", "widht", "expected one of"]),
        ("width = 16", "width = \"wide\"", &["bad.toml", "width = \"wide\"", "invalid type"]),
        ("heads = 2", "heads = 3", &["heads", "divisor of the width 16", "found 3"]),
        ("dropout = 0.1", "dropout = 1.0", &["dropout", "[0, 1)"]),
        ("batch = 3", "batch = 0", &["training.batch", "at least 1"]),
        (
            "batch = 3",
            "batch = 3\ncontext = 17",
            &["training.context", "the model's context of 16", "found 17"],
        ),
        ("batch = 3", "batch = 3\npolicy = \"forget\"", &["forget", "keep, recompute, rerun, offload"]),
        ("batch = 3", "batch = 3\nmemory = \"much\"", &["much", "512MiB"]),
        ("batch = 3", "batch = 3\nprecision = \"f64\"", &["f64", "f32"]),
        ("batch = 3", "batch = 3\ndevice = \"gpu\"", &["`gpu` is no device", "cuda:N"]),
        ("[model]", "[model]\nname = \"gpt5\"", &["gpt5", "gpt2-medium"]),
        ("vocabulary = 256", "vocabulary = 99", &["model.vocabulary", "at least the 256 tokens", "found 99"]),
        ("validation_fraction = 0.2", "validation_fraction = 1.5", &["data.validation_fraction", "1.5"]),
        ("[training]", "[schedule]\npeak = -1.0\n[training]", &["peak", "at least 0", "-1"]),
        ("[training]", "[optimizer]\nbeta2 = 1.0\n[training]", &["beta2", "[0, 1)"]),
        ("[model]", "model", &["bad.toml", "line"]),
    ];
    for (from, to, expected) in cases {
        config(&CONFIG.replace(from, to));
        let error = place.fail(&["train", "bad.toml", "--out", "run"]);
        assert!(expected.iter().all(|part| error.contains(part)), "{to}: {error}");
        assert!(!place.path("run").exists(), "{to}: a folder was made");
    }
    let error =
        place.fail(&["train", "run.toml", "--policy", "h.*: offload int8, hh.1: keep", "--out", "run"]);
    assert!(error.contains("`hh.1` matches no segment and no tensor; the nearest names are h.1"), "{error}");
    assert!(place.fail(&["train", "missing.toml"]).contains("missing.toml: cannot read"));
    assert!(place.fail(&["train", "run.toml", "--memory", "lots"]).contains("512MiB"));
    assert!(place.fail(&["train", "run.toml", "--resume"]).contains("--out"));
    // With or without a driver.
    let error = place.fail(&["train", "run.toml", "--device", "cuda:9999", "--out", "run"]);
    assert!(error.contains("CUDA device 9999 cannot be used"), "{error}");
    assert!(place.fail(&["bench", "--device", "cuda:9999"]).contains("CUDA device 9999 cannot be used"));
}

#[test]
fn bad_tokens_are_errors_before_a_folder_is_made() {
    let place = Place::new();
    let corpus = place.path("corpus.bin");
    let good = fs::read(&corpus).unwrap();
    let mut beyond = good.clone();
    beyond[2 * 1000..2 * 1000 + 2].copy_from_slice(&300u16.to_le_bytes());
    let cases: [(&[u8], &[&str]); 4] = [
        (&good[..good.len() - 1], &["corpus.bin", "odd", "5439"]),
        (&[], &["corpus.bin", "at least one token", "found none"]),
        (&good[..2 * 16], &["corpus.bin", "16", "17"]),
        (&beyond, &["corpus.bin", "300", "1000", "2000", "256"]),
    ];
    for (bytes, expected) in cases {
        fs::write(&corpus, bytes).unwrap();
        let error = place.fail(&["train", "run.toml", "--out", "run"]);
        assert!(expected.iter().all(|part| error.contains(part)), "{expected:?}: {error}");
        assert!(!place.path("run").exists());
    }
    fs::remove_file(&corpus).unwrap();
    assert!(place.fail(&["train", "run.toml", "--out", "run"]).contains("corpus.bin"));
}

#[test]
fn runs_are_not_mixed_up() {
    let place = Place::new();
    place.succeed(&["train", "run.toml", "--out", "run", "--steps", "6"]);
    let before = fs::read(place.path("run/metrics.jsonl")).unwrap();
    let error = place.fail(&["train", "run.toml", "--out", "run"]);
    assert!(error.contains("already holds a run") && error.contains("--resume"), "{error}");
    let error = place.fail(&["train", "--out", "run", "--resume", "--seed", "7"]);
    assert!(error.contains("training.seed is 1337 in the run, 7 asked for"), "{error}");
    let error = place.fail(&["train", "--out", "run", "--resume", "--dropout", "0.5"]);
    assert!(error.contains("model.dropout"), "{error}");
    // What loses bits is another run; what does not is not.
    let error = place.fail(&["train", "--out", "run", "--resume", "--policy", "offload int8"]);
    assert!(error.contains("training.policy is \"keep\" in the run, \"offload int8\" asked for"), "{error}");
    assert_eq!(fs::read(place.path("run/metrics.jsonl")).unwrap(), before);

    // Other tokens are another run.
    let mut tokens = fs::read(place.path("corpus.bin")).unwrap();
    tokens.swap(0, 2);
    fs::write(place.path("corpus.bin"), &tokens).unwrap();
    let error = place.fail(&["train", "--out", "run", "--resume"]);
    assert!(error.contains("tokens have changed"), "{error}");

    for command in ["eval", "sample"] {
        assert!(place.fail(&[command, "nowhere"]).contains("no run here"));
    }
    let weights = place.path("run/checkpoints/step-000006/weights.safetensors");
    let bytes = fs::read(&weights).unwrap();
    fs::write(&weights, &bytes[..bytes.len() / 2]).unwrap();
    assert!(place.fail(&["sample", "run"]).contains("cut short"));
}

#[test]
fn a_budget_that_is_too_small_says_what_would_fit() {
    let place = Place::new();
    let config = CONFIG.replace("layers = 2", "layers = 12").replace("batch = 3", "batch = 8");
    fs::write(place.path("deep.toml"), config).unwrap();
    let error = place.fail(&["train", "deep.toml", "--out", "run", "--memory", "1MiB"]);
    let parts = ["budget of 1.00 MiB", "needs", "more", "nearest setting that fits is --policy"];
    assert!(parts.iter().all(|part| error.contains(part)), "{error}");
    assert!(!place.path("run").exists());
    // The setting that it names does fit.
    let words: Vec<&str> = error.split("fits is ").nth(1).unwrap().split([' ', ',']).collect();
    let mut arguments = vec!["train", "deep.toml", "--out", "run", "--memory", "1MiB", "--steps", "2"];
    arguments.extend(&words[..6]);
    place.succeed(&arguments);
    let budget = 1 << 20;
    assert!(place.metrics("run").iter().all(|line| line["peak_device_bytes"].as_u64().unwrap() <= budget));
    let error = place.fail(&["train", "deep.toml", "--out", "other", "--memory", "64KiB"]);
    assert!(error.contains("nothing fits: single sequences need"), "{error}");
}

#[test]
fn bench_prints_one_object() {
    let place = Place::new();
    let arguments = [
        "bench",
        "--model",
        "gpt2",
        "--batch",
        "1",
        "--context",
        "8",
        "--policy",
        "keep",
        "--steps",
        "1",
        "--json",
    ];
    let report: Value = serde_json::from_str(&place.succeed(&arguments)).unwrap();
    for key in ["tokens_per_second", "seconds_per_step", "saved_bytes", "peak_device_bytes"] {
        assert!(report[key].as_f64().unwrap() > 0.0, "{key} in {report}");
    }
    assert!(place.fail(&["bench", "--model", "gpt9"]).contains("gpt2-xl"));
}

/// The bundled text, a few steps of the quick start.
#[test]
fn the_quick_start_needs_no_arguments() {
    let place = Place::new();
    let said = place.succeed(&["train", "--steps", "1"]);
    assert!(said.contains("runs/1") && said.contains("3.027 nats"), "{said}");
    assert!(Path::new(&place.path("runs/1/metrics.jsonl")).exists());
    place.succeed(&["train", "--steps", "1"]);
    assert!(place.path("runs/2/summary.json").exists());
}

/// Under a budget that keeping does not fit, through a disk and a little host memory, with the losses of a run that keeps.
#[test]
fn tiers_and_their_account() {
    use ebbtide::{
        engine::{
            gpt2::Gpt2Config,
            plan::{StepShape, least_budget},
        },
        offload::{DiskOptions, Expression, OffloadOptions},
    };
    let place = Place::new();
    let model = Gpt2Config {
        vocabulary: 256,
        context: 64,
        width: 64,
        layers: 4,
        heads: 4,
        dropout: 0.1,
        exact_gelu: false,
        epsilon: 1e-5,
    };
    let config = "[model]\nvocabulary = 256\ncontext = 64\nwidth = 64\nlayers = 4\nheads = 4\ndropout = 0.1\n\
                  [data]\ntokens = \"corpus.bin\"\ntokenizer = \"bytes\"\nvalidation_fraction = 0.2\n\
                  [training]\nsteps = 3\nbatch = 8\nvalidation_windows = 2\nsample_tokens = 0\n";
    fs::write(place.path("larger.toml"), config).unwrap();
    let kept = place.succeed(&["train", "larger.toml", "--out", "kept"]);
    assert!(!kept.contains("note ") && !kept.contains("tiers "), "{kept}");
    let losses = |run: &str| place.metrics(run).iter().map(|line| line["loss"].clone()).collect::<Vec<_>>();

    let shape = StepShape {
        model,
        batch: 8,
        context: 64,
        accumulate: 1,
        offload_optimizer: false,
        numerics: Default::default(),
    };
    let least = |policy: &str| {
        let disk = Some(DiskOptions::new(place.path(""), 1 << 30));
        let options = OffloadOptions { disk, measure_errors: true, ..OffloadOptions::default() };
        let budget = least_budget(&shape, policy.parse::<Expression>().unwrap(), &options).unwrap();
        (budget + (64 << 10)).to_string()
    };
    let memory = least("offload disk");
    let output = place.succeed(&[
        "train",
        "larger.toml",
        "--out",
        "disk",
        "--policy",
        "offload disk",
        "--memory",
        &memory,
        "--verify",
        "--spill",
        ".",
    ]);
    assert!(output.contains("of disk in"), "{output}");
    assert_eq!(losses("disk"), losses("kept"));
    let account = place.metrics("disk")[2]["offload"].clone();
    let moved = account["moved"]["disk raw"].clone();
    assert!(
        moved["out_bytes"].as_u64().unwrap() > 1 << 20
            && moved["in_bytes"].as_u64() >= moved["out_bytes"].as_u64(),
        "{account}"
    );
    assert!(account["transfer_seconds"].as_f64().unwrap() > 0.0 && account["hidden_share"].is_number());
    assert!(
        account["wait_seconds"].is_object() && account["disk_bytes"].as_u64().unwrap() > 1 << 20,
        "{account}"
    );
    assert!(account["peak_device_bytes"]["activations"].as_u64().unwrap() > 0, "{account}");
    let summary: Value = serde_json::from_slice(&fs::read(place.path("disk/summary.json")).unwrap()).unwrap();
    let total = summary["offload"]["moved"]["disk raw"]["out_bytes"].as_u64().unwrap();
    assert!(total > moved["out_bytes"].as_u64().unwrap());
    assert_eq!(
        fs::read_dir(place.path(""))
            .unwrap()
            .filter(|entry| {
                let name = entry.as_ref().unwrap().file_name().into_string().unwrap();
                !["corpus.bin", "run.toml", "larger.toml", "kept", "disk"].contains(&name.as_str())
            })
            .count(),
        0,
        "the spill file has no name"
    );

    let memory = least("offload int8/64~3");
    // Too little host memory hands on to the disk, and what is measured is there.
    let output = place.succeed(&[
        "train",
        "larger.toml",
        "--out",
        "both",
        "--policy",
        "offload int8/64~3",
        "--memory",
        &memory,
        "--host-memory",
        "256KiB",
        "--disk-memory",
        "64MiB",
        "--measure-errors",
    ]);
    assert!(output.contains("went on to disk"), "{output}");
    let account = place.metrics("both")[2]["offload"].clone();
    assert!(account["fallbacks"]["to_disk"].as_u64().unwrap() > 0, "{account}");
    assert!(account["compression"].as_f64().unwrap() > 3.7, "{account}");
    let worst = account["worst_errors"]["int8"].as_f64().unwrap();
    assert!(worst > 0.0 && worst.is_finite(), "{account}");

    let error =
        place.fail(&["train", "larger.toml", "--out", "x", "--policy", "offload disk", "--spill", "nowhere"]);
    assert!(error.contains("nowhere"), "{error}");
    let error =
        place.fail(&["train", "larger.toml", "--out", "y", "--policy", "offload", "--host-memory", "1PiB"]);
    assert!(error.contains("no host memory for `the host tier`: 1048576.0 GiB wanted"), "{error}");
}

#[test]
fn a_policy_that_did_nothing_is_said_so() {
    let place = Place::new();
    // Every tensor of this model is small.
    let output = place.succeed(&["train", "run.toml", "--steps", "2", "--policy", "offload"]);
    assert!(output.contains("note      the policy `offload` moved no byte"), "{output}");
    assert!(
        output.contains("no lower than keeping everything would") && output.contains("weights"),
        "{output}"
    );
}

#[test]
fn plans_say_how_long_a_step_takes_at_least() {
    let place = Place::new();
    let plan = ["plan", "--precision", "bf16", "--ops", "--json", "--card"];
    let seconds = |card| {
        let plan: Value = serde_json::from_str(&place.succeed(&[&plan[..], &[card]].concat())).unwrap();
        let time = &plan["rows"][0]["time"];
        let seconds = time["seconds"].as_f64().unwrap();
        let of_ops = time["ops"].as_array().unwrap().iter().map(|op| op["seconds"].as_f64().unwrap());
        let (all, rate) = (of_ops.sum::<f64>(), time["tokens_per_second"].as_f64().unwrap());
        assert!((all / seconds - 1.0).abs() < 0.01, "ops of {all} s, a step of {seconds}");
        assert!((rate * seconds / (8.0 * 1024.0) - 1.0).abs() < 1e-9, "{rate}");
        seconds
    };
    assert!(seconds("h200") < seconds("a100") && seconds("a100") < seconds("rtx-3090"));
    let error = place.fail(&["plan", "--card", "abacus"]);
    assert!(error.contains("abacus") && error.contains("h200"), "{error}");
    // A machine without a card, or with one whose peaks are known, or not.
    let here = place.run(&["plan", "--card", "here"]);
    let said = String::from_utf8_lossy(&here.stderr);
    assert!(here.status.success() || said.contains("--card here"), "{said}");
}

#[test]
fn plans_say_what_a_step_needs() {
    let place = Place::new();
    let table: Value = serde_json::from_str(&place.succeed(&[
        "plan",
        "--batch",
        "2",
        "--context",
        "512",
        "--table",
        "--json",
    ]))
    .unwrap();
    let rows = table["rows"].as_array().unwrap();
    let names: Vec<&str> = rows.iter().map(|row| row["policy"].as_str().unwrap()).collect();
    let expected =
        ["keep", "rerun-cheap", "int8", "recompute", "recompute-offload", "recompute-offload-optimizer"];
    assert_eq!(names, expected);
    let totals: Vec<u64> = rows.iter().map(|row| row["total_bytes"].as_u64().unwrap()).collect();
    assert!(totals.is_sorted_by(|a, b| a > b), "each row needs less than the one before: {totals:?}");
    // The bench runs what was planned.
    let bench = place.succeed(&[
        "bench",
        "--model",
        "gpt2",
        "--batch",
        "1",
        "--context",
        "16",
        "--steps",
        "1",
        "--json",
        "--offload-optimizer",
        "--policy",
        "offload int8",
    ]);
    let bench: Value = serde_json::from_str(&bench).unwrap();
    let plan = place.succeed(&[
        "plan",
        "--batch",
        "1",
        "--context",
        "16",
        "--json",
        "--offload-optimizer",
        "--policy",
        "offload int8",
    ]);
    let plan: Value = serde_json::from_str(&plan).unwrap();
    assert_eq!(plan["rows"][0]["total_bytes"], bench["peak_device_bytes"]);
    assert!(place.succeed(&["plan", "--batch", "1", "--policy", "offload disk"]).contains("offload disk"));
    for (arguments, expected) in [
        (vec!["plan", "--batch", "0"], "at least 1"),
        (vec!["plan", "--context", "4096"], "at most the 1024 positions of gpt2"),
        (vec!["plan", "--model", "gpt3"], "gpt3"),
        (vec!["plan", "--policy", "x.*: keep"], "`x.*` matches no segment and no tensor"),
        (vec!["plan", "--memory", "1MiB"], "out of device memory"),
    ] {
        let error = place.fail(&arguments);
        assert!(error.contains(expected), "{arguments:?}: {error}");
    }
}

/// What cannot start claims nothing, and what the error advises works.
#[test]
fn a_start_that_fails_leaves_the_folder_free() {
    let place = Place::wide();
    let train = ["train", "run.toml", "--out", "run", "--steps", "1"];
    let with = |more: &[&'static str]| [&train[..], more].concat();
    let error = place.fail(&with(&["--policy", "offload disk", "--spill", "no/such/folder"]));
    assert!(error.contains("no/such/folder"), "{error}");
    // A policy that names the disk and sends nothing there needs none of it.
    place.succeed(&with(&["--policy", "h.0: offload disk, keep", "--spill", "no/such/folder"]));
}

#[test]
fn sizes_beyond_reason_are_errors() {
    let place = Place::new();
    for (flag, value) in [
        ("--batch", "99999999999"),
        ("--batch", "18446744073709551615"),
        ("--accumulate", "18446744073709551615"),
        ("--threads", "100000"),
        ("--disk-memory", "18446744073709551615"),
    ] {
        let error =
            place.fail(&["train", "run.toml", "--out", "run", "--policy", "offload disk", flag, value]);
        let errors = error.lines().filter(|line| line.starts_with("error: ")).count();
        assert!(errors == 1, "{flag} {value}: {error}");
        assert!(!place.path("run/config.toml").exists(), "{flag} {value}");
    }
    let error = place.fail(&["plan", "--batch", "99999999999"]);
    assert!(error.contains("batch: expected from 1 to 67108864 tokens, found 99999999999 × 1024"), "{error}");
}

/// More of a budget is never worse, and the size that an error gives is enough as it is printed.
#[test]
fn every_budget_from_the_advised_one_on_runs() {
    let place = Place::wide();
    let run = |name: &str, policy: &str, memory: &str| {
        let arguments =
            ["train", "run.toml", "--steps", "1", "--out", name, "--policy", policy, "--memory", memory];
        place.run(&arguments)
    };
    let refused = run("refused", "offload int8", "6MiB");
    let error = String::from_utf8(refused.stderr).unwrap();
    let needs = error.split(" needs ").nth(1).and_then(|rest| rest.split(',').next()).unwrap();
    let needs: String = needs.chars().filter(|c| !c.is_whitespace()).collect();
    assert!(!refused.status.success() && needs.ends_with("MiB"), "{error}");
    let advised: f64 = needs.trim_end_matches("MiB").parse().unwrap();
    for i in 0..14 {
        let memory = format!("{:.1}MiB", advised + 0.1 * f64::from(i));
        let output = run(&format!("run-{i}"), "offload int8", &memory);
        assert!(output.status.success(), "{memory}: {}", String::from_utf8_lossy(&output.stderr));
    }
}

/// What comes back with loss makes a segment give something else, as it was asked to.
#[test]
fn verifying_accepts_segments_whose_input_is_stored_with_loss() {
    let place = Place::new();
    let train = ["train", "run.toml", "--steps", "2", "--verify"];
    place.succeed(&[&train[..], &["--out", "a", "--policy", "h.*: recompute, *input*: int8"]].concat());
    place.succeed(&[&train[..], &["--out", "b", "--policy", "recompute"]].concat());
}
