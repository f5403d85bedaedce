#!/bin/sh
# What int8 costs a model's quality: trains the quick start under `keep` and under another policy, once a seed, and prints the
# validation losses beside each other.
#
#   scripts/int8-quality.sh [POLICY] [SEED…]        default: offload int8, seeds 1 2 3
#
# About seven minutes a seed on two cores.
set -eu
cd "$(dirname "$0")/.."
policy=${1:-offload int8}
[ $# -gt 0 ] && shift
[ $# -gt 0 ] || set -- 1 2 3
cargo build --release -q
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
loss() {
    target/release/ebbtide train --out "$folder/$2" --seed "$1" --policy "$3" >"$folder/log" 2>&1 || { cat "$folder/log" >&2; exit 1; }
    sed -n 's/.*"validation_loss": \([0-9.]*\).*/\1/p' "$folder/$2/summary.json"
}
echo "seed  keep       $policy   ratio"
for seed; do
    keep=$(loss "$seed" "keep-$seed" keep)
    other=$(loss "$seed" "other-$seed" "$policy")
    echo "$seed $keep $other" | awk '{ printf "%-5s %-10s %-12s %.4f\n", $1, $2, $3, $3 / $2 }'
done
