#!/bin/sh
# Runs every CUDA kernel without a GPU: the checked-in PTX, on an interpreter that checks each access, against the CPU's results on
# random shapes and types; and the interpreter's own tests. EBBTIDE_SOAK=1 takes 500 shapes of each instead of 10.
set -eu
cd "$(dirname "$0")/.."
cargo test -p ebbtide-kernels --lib cuda
cargo test -p ebbtide-ptx
