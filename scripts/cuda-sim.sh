#!/bin/sh
# Runs the `cuda` backend's own tests, then the workspace's engine and offload tests on `cuda`, on a simulated driver that executes the
# kernels' PTX. Queues run in an order of EBBTIDE_SIM_ORDER: eager, lazy or random:SEED (random:1 if not given); an access that no
# event orders ends the test. Arguments are the names of the engine's tests to run instead. EBBTIDE_SOAK=1 takes 1000 seeds of the
# backend's random programs instead of 40.
set -eu
cd "$(dirname "$0")/.."
cargo test -p ebbtide-kernels --test cuda_sim
cargo build -p ebbtide-simcuda -p ebbtide-simcublaslt
libraries=$(mktemp -d)
trap 'rm -r "$libraries"' EXIT
target=$(cargo metadata --format-version 1 --no-deps | sed 's/.*"target_directory":"\([^"]*\)".*/\1/')
ln -s "$target/debug/libebbtide_simcuda.so" "$libraries/libcuda.so"
ln -s "$target/debug/libebbtide_simcublaslt.so" "$libraries/libcublasLt.so"
export LD_LIBRARY_PATH="$libraries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
export EBBTIDE_DEVICE=cuda EBBTIDE_SIM_ORDER="${EBBTIDE_SIM_ORDER:-random:1}"
[ $# -gt 0 ] || cargo test -p ebbtide-kernels --lib a_device_gives
# What comes as late as can be shows a missing edge every time.
[ $# -gt 0 ] || EBBTIDE_SIM_ORDER=lazy cargo test -p ebbtide-offload --test scenarios -- --test-threads 1
tests=$(printf ' --test %s' ${*:-golden_gpt2 loss_scaler lossy optimizer_offload random_models segments})
# shellcheck disable=SC2086 # Several options. One test at a time: each takes the card's memory.
cargo test -p ebbtide $tests -- --test-threads 1
[ $# -gt 0 ] || cargo test -p ebbtide --test policies every_policy -- --test-threads 1
