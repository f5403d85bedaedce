#!/bin/sh
# Compiles CUDA kernels to PTX with NVRTC: neither a GPU nor the CUDA toolkit is needed, only Python and a package registry.
#
#   scripts/cuda-compile.sh                        everything that is checked in: PTX for sm_80 of kernels/cuda and of the tests'
#                                                  kernels, and kernels/cuda/resources.tsv, registers and shared memory by architecture
#   scripts/cuda-compile.sh --check                says what differs from what is checked in, and fails if anything does
#   scripts/cuda-compile.sh --compiles             compiles all that for all architectures, and compares nothing: for another NVRTC
#   scripts/cuda-compile.sh -a 80,90 -o DIR F.cu…  these files for these architectures, to DIR/NAME.sm_80.ptx…
#   scripts/cuda-compile.sh -v …                   also prints registers, spills and shared memory of each kernel
#
# NVRTC comes from its Python wheels (92 MB), kept in $EBBTIDE_CUDA or target/cuda. Its version is pinned: PTX newer than the
# driver is refused by the driver, and CUDA 13.0 is the oldest that compiles for every card from Turing to Blackwell. Another is
# taken where EBBTIDE_NVRTC names it. Exit status 3: no package registry, nothing compiled.
set -eu
cd "$(dirname "$0")/.."
version=${EBBTIDE_NVRTC:-13.0.88}
runtime=13.0.96
cccl=13.0.85
crt=13.0.88
cache=${EBBTIDE_CUDA:-${CARGO_TARGET_DIR:-target}/cuda}${EBBTIDE_NVRTC:+-$EBBTIDE_NVRTC}
python=$cache/bin/python3

if [ ! -e "$cache/$version" ]; then
    if ! python3 -m venv "$cache"; then
        echo "cuda-compile: python3 and its venv module are needed to fetch NVRTC. NOTHING WAS COMPILED." >&2
        exit 3
    fi
    if ! "$cache/bin/pip" install -q --disable-pip-version-check --retries 1 --timeout 20 --no-deps nvidia-cuda-nvrtc==$version \
        nvidia-cuda-runtime==$runtime nvidia-cuda-crt==$crt nvidia-cuda-cccl==$cccl; then
        echo "cuda-compile: NVRTC $version cannot be fetched: no package registry answers. NOTHING WAS COMPILED." >&2
        exit 3
    fi
    touch "$cache/$version"
fi
exec "$python" scripts/nvrtc.py "$@"
