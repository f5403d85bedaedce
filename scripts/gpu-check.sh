#!/bin/sh
# Everything that a machine without a GPU cannot say, in one run on a machine with one.
#
#   scripts/gpu-check.sh --pack   builds the tests, benches and the program, without a GPU, into target/gpu-check.tar.xz (under 64 MiB)
#   scripts/gpu-check.sh          from the archive, on the machine with the card: builds nothing, takes under 8 minutes, and leaves the
#                                 card's settings alone
#
# First the tests: each kernel against the interpreter of its code, golden GPT-2, the loss scaler's table, policies that must not change
# a bit, the ten scenarios of offloading. Then the figures: every op beside copies and products of the card, transfers beside a bare
# probe, steps of GPT-2 124M beside PyTorch's (where EBBTIDE_PEER_PYTHON, or python3, has it with CUDA), the device's bytes by the
# driver beside the ledger, and the least times that were predicted. All goes to $OUT/gpu-check.log too, where OUT is a folder.
# EBBTIDE_QUICK=1 takes the smallest sizes, to try the script on a simulated driver.
set -eu
cd "$(dirname "$0")/.."
archive=target/gpu-check.tar.xz
tests="golden_gpt2 loss_scaler lossy optimizer_offload segments policies random_models memory resume"

pack() {
    folder=$(mktemp -d)
    trap 'rm -r "$folder"' EXIT
    take() { # Its name there, then what cargo built.
        name=$1
        shift
        built=$(cargo "$@" --message-format=json | sed -n 's/.*"executable":"\([^"]*\)".*/\1/p' | tail -n 1)
        strip -o "$folder/$name" "$built"
    }
    take ebbtide build --release --bin ebbtide
    take kernels test --release --no-run -p ebbtide-kernels --lib
    take scenarios test --release --no-run -p ebbtide-offload --test scenarios
    for test in $tests; do take "$test" test --release --no-run -p ebbtide --test "$test"; done
    take bench-kernels bench --no-run -p ebbtide-kernels --bench kernels
    take bench-gpt2 bench --no-run -p ebbtide --bench gpt2
    tar -C "$folder" -cJf "$archive" .
    ls -l "$archive"
}

if [ "${1:-}" = --pack ]; then
    pack
    exit
fi
if [ -n "${OUT:-}" ] && [ -z "${EBBTIDE_LOGGED:-}" ]; then
    EBBTIDE_LOGGED=1 sh scripts/gpu-check.sh 2>&1 | tee "$OUT/gpu-check.log"
    exit
fi

folder=$(mktemp -d)
trap 'rm -r "$folder"' EXIT
tar -C "$folder" -xJf "$archive"
export CARGO_MANIFEST_DIR="$PWD" EBBTIDE_GOLDEN_DIR="$PWD/tests/golden" EBBTIDE_DEVICE=cuda RUST_BACKTRACE=0
if [ -n "${EBBTIDE_QUICK:-}" ]; then
    tests=golden_gpt2
    kernels="--batch 1 --context 2 --copy-mib 1 --product 16 --runs 1 --only add"
    model="--batch 1 --context 8" steps=
else
    kernels="--batch 8 --context 1024"
    model="--batch 32 --context 1024" steps="bf16:2 f16:1 f32:1"
fi
start=$(date +%s)
so_far() { echo "[$(($(date +%s) - start)) s]"; }
used() { nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits 2>/dev/null | head -n 1; }

nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader || echo "no nvidia-smi"
failed=
run_test() { # Seconds it may take, its name, the program, its arguments.
    if timeout "$1" "$folder/$3" $4 --test-threads 1 >"$folder/log" 2>&1; then
        echo "ok      $2: $(grep -c '\.\.\. ok$' "$folder/log") tests $(so_far)"
    else
        echo "FAILED  $2 $(so_far)"
        tail -n 30 "$folder/log"
        failed="$failed $2"
    fi
}
echo "
== tests"
run_test 60 "each kernel against the interpreter" kernels a_device_gives
run_test 60 scenarios scenarios ""
for test in $tests; do
    run_test 60 "$test" "$test" "$([ "$test" = policies ] && echo every_policy || :)"
done

echo "
== ops $(so_far)"
# shellcheck disable=SC2086 # Several options.
timeout 100 "$folder/bench-kernels" --bench --device cuda $kernels || failed="$failed bench-kernels"

echo "
== steps $(so_far)"
python=${EBBTIDE_PEER_PYTHON:-$(command -v python3 || :)}
if [ -n "$python" ] && "$python" -c "import torch; torch.zeros(1, device='cuda')" 2>/dev/null; then
    export EBBTIDE_PEER_PYTHON="$python"
else
    unset EBBTIDE_PEER_PYTHON
    echo "no PyTorch with CUDA: Ebbtide alone"
fi
for step in $steps; do
    precision=${step%:*}
    # f32 is there for reference.
    [ "$precision" != f32 ] || set -- --policies keep --peers none
    # shellcheck disable=SC2086
    timeout 150 "$folder/bench-gpt2" --bench --device cuda $model --precision "$precision" --rounds "${step#*:}" --steps 5 "$@" ||
        failed="$failed bench-gpt2-$precision"
    echo "$(so_far)
"
done

memory() {
    echo "== memory $(so_far)"
    # shellcheck disable=SC2086
    plan=$("$folder/ebbtide" plan $model --precision bf16 --json)
    extent=$(echo "$plan" | sed 's/.*"extent_bytes":\([0-9]*\).*/\1/')
    before=$(used)
    # shellcheck disable=SC2086
    "$folder/ebbtide" bench --device cuda $model --precision bf16 --memory "${extent}B" --steps 20 --json >"$folder/bench" &
    pid=$! most=0
    while kill -0 $pid 2>/dev/null; do
        now=$(used)
        [ "${now:-0}" -le "$most" ] || most=$now
        sleep 0.2
    done
    wait $pid || failed="$failed memory"
    echo "the ledger's peak: $(sed 's/.*"peak_device_bytes":\([0-9]*\).*/\1/' "$folder/bench") bytes of a budget of $extent"
    [ -z "$before" ] || echo "the driver's, context and scratch counted: $((most - before)) MiB"
}
# No interpreter runs the whole model.
[ -n "${EBBTIDE_QUICK:-}" ] || memory

echo "
== predicted $(so_far)"
# shellcheck disable=SC2086
"$folder/ebbtide" plan $model --precision bf16 --card here --table || echo "its peaks are not known"
echo "
${failed:+FAILED:$failed }done $(so_far)"
[ -z "$failed" ]
