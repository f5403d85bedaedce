//! Windows of a file larger than memory, shuffled, beside the disk and beside PyTorch, in one paired run.
//!
//! ```text
//! EBBTIDE_PEER_PYTHON=/path/to/venv/bin/python cargo bench --bench loader -- [--gib 8] [--rounds 3] [--seconds 20] [--folder /tmp]
//! ```
//!
//! Makes a file of `--gib` GiB of random u16 tokens, and takes windows of 1024 of them (2 KiB) in batches of 32, in turn: Ebbtide
//! in block order under a hard limit of memory of 512 MiB and of 128 MiB, each beside raw sequential reads of the same file in
//! the same process; then the peers under 640 MiB (they need more of it for themselves). Cold: the file is dropped from the
//! page cache first. At last a file that fits the cache, warm and without a limit. Medians of `--rounds`. Limits need root or a systemd
//! session (`scripts/memory-limit.sh`); the peers need `EBBTIDE_PEER_PYTHON`, a Python with torch.
#![allow(missing_docs)]

use std::{
    error::Error,
    fs::File,
    io::{BufWriter, Write},
    path::Path,
    process::Command,
};

use ebbtide::bench::median;
use serde_json::Value;

const CONTEXT: &str = "1024";
const BATCH: &str = "32";
const PEERS: [&str; 3] = ["get_batch", "dataloader-0", "dataloader-2"];
/// What the warm file holds.
const WARM_BYTES: u64 = 1 << 30;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().collect();
    let value = |flag: &str, default: &str| -> Result<String, Box<dyn Error>> {
        match arguments.iter().position(|argument| argument == flag) {
            Some(at) => Ok(arguments.get(at + 1).ok_or(format!("{flag} needs a value"))?.clone()),
            None => Ok(default.to_string()),
        }
    };
    let gib: u64 = value("--gib", "8")?.parse()?;
    let rounds: usize = value("--rounds", "3")?.parse()?;
    let seconds = value("--seconds", "20")?;
    let folder = tempfile::tempdir_in(value("--folder", &std::env::temp_dir().display().to_string())?)?;
    let (cold, warm) = (folder.path().join("tokens.bin"), folder.path().join("warm.bin"));
    random_tokens(&cold, gib << 30)?;
    random_tokens(&warm, WARM_BYTES)?;
    let python = std::env::var("EBBTIDE_PEER_PYTHON").ok();
    let ours = |file: &Path, limit: Option<&str>| -> Result<Value, Box<dyn Error>> {
        let mut command = command(limit, env!("CARGO_BIN_EXE_ebbtide"));
        command.args(["bench-loader", "--json", "--order", "block", "--context", CONTEXT, "--batch", BATCH]);
        command.args(["--seconds", &seconds]).arg(file);
        if limit.is_none() {
            command.arg("--warm");
        }
        run(&mut command)
    };
    let peer =
        |python: &str, file: &Path, limit: Option<&str>, kind: &str| -> Result<Value, Box<dyn Error>> {
            let mut command = command(limit, python);
            command.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/benches/peers/loader_windows.py")).arg(file);
            command.args([CONTEXT, BATCH, &seconds, kind]);
            if limit.is_none() {
                command.arg("warm");
            }
            run(&mut command)
        };

    println!("{:<34}{:>12}{:>12}{:>10}{:>8}{:>12}", "", "windows/s", "MB/s", "of raw", "read", "resident");
    let mut best_peer = [0.0f64; 2];
    let mut best_own = [0.0f64; 2];
    for limit in ["512M", "128M"] {
        let mut of_raw = Vec::new();
        let (mut windows, mut rate, mut read, mut resident) =
            (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for _ in 0..rounds {
            let found = ours(&cold, Some(limit))?;
            let number = |key: &str| found[key].as_f64().unwrap_or(f64::NAN);
            of_raw.push(number("bytes_per_second") / number("raw_sequential_bytes_per_second"));
            windows.push(number("windows_per_second"));
            rate.push(number("bytes_per_second"));
            read.push(number("read_amplification"));
            resident.push(number("peak_resident_bytes"));
        }
        let windows = median(&mut windows);
        best_own[0] = best_own[0].max(windows);
        println!(
            "{:<34}{windows:>12.0}{:>12.0}{:>10.2}{:>8.3}{:>8.0} MiB",
            format!("ebbtide, cold, limit {limit}"),
            median(&mut rate) / 1e6,
            median(&mut of_raw),
            median(&mut read),
            median(&mut resident) / f64::from(1 << 20)
        );
    }
    let mut rows: Vec<(String, usize, f64, f64)> = Vec::new();
    for (i, (file, limit)) in [(&cold, Some("640M")), (&warm, None)].into_iter().enumerate() {
        let state = if i == 0 { "cold, limit 640M" } else { "warm" };
        if i == 1 {
            // Into the page cache.
            std::io::copy(&mut File::open(file)?, &mut std::io::sink())?;
            let mut windows = Vec::new();
            let mut rate = Vec::new();
            for _ in 0..rounds {
                let found = ours(file, None)?;
                windows.push(found["windows_per_second"].as_f64().unwrap_or(f64::NAN));
                rate.push(found["bytes_per_second"].as_f64().unwrap_or(f64::NAN));
            }
            best_own[1] = median(&mut windows);
            rows.push(("ebbtide, warm".to_string(), i, best_own[1], median(&mut rate)));
        }
        for kind in python.iter().flat_map(|_| PEERS) {
            let (mut windows, mut rate) = (Vec::new(), Vec::new());
            for _ in 0..rounds {
                let found = peer(python.as_deref().unwrap_or_default(), file, limit, kind)?;
                windows.push(found["windows_per_second"].as_f64().unwrap_or(f64::NAN));
                rate.push(found["bytes_per_second"].as_f64().unwrap_or(f64::NAN));
            }
            let windows = median(&mut windows);
            best_peer[i] = best_peer[i].max(windows);
            rows.push((format!("torch {kind}, {state}"), i, windows, median(&mut rate)));
        }
    }
    for (name, _, windows, rate) in rows {
        println!("{name:<34}{windows:>12.0}{:>12.1}", rate / 1e6);
    }
    if python.is_some() {
        println!("\ncold, over the best peer: {:.0} ×", best_own[0] / best_peer[0]);
        println!("warm, over the best peer: {:.1} ×", best_own[1] / best_peer[1]);
    }
    Ok(())
}

/// A program, under a hard limit of memory if there is one.
fn command(limit: Option<&str>, program: &str) -> Command {
    match limit {
        Some(limit) => {
            let mut command = Command::new(concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/memory-limit.sh"));
            command.args([limit, program]);
            command
        }
        None => Command::new(program),
    }
}

fn run(command: &mut Command) -> Result<Value, Box<dyn Error>> {
    let output = command.output()?;
    if !output.status.success() {
        return Err(format!("{command:?} failed: {}", String::from_utf8_lossy(&output.stderr)).into());
    }
    Ok(serde_json::from_slice(&output.stdout)?)
}

fn random_tokens(path: &Path, bytes: u64) -> Result<(), Box<dyn Error>> {
    let mut random = fastrand::Rng::with_seed(bytes);
    let mut file = BufWriter::new(File::create(path)?);
    let mut piece = vec![0u8; 1 << 20];
    for _ in 0..bytes >> 20 {
        random.fill(&mut piece);
        file.write_all(&piece)?;
    }
    file.into_inner()?.sync_all()?;
    Ok(())
}
