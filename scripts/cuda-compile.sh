#!/bin/sh
# Compiles CUDA kernels to PTX with NVRTC: neither a GPU nor the CUDA toolkit is needed, only Python and a package registry.
#
#   scripts/cuda-compile.sh                        every kernel of the tests, for sm_80, to the .ptx beside it
#   scripts/cuda-compile.sh -a 80,90 -o DIR F.cu…  these files for these architectures, to DIR/NAME.sm_80.ptx…
#   scripts/cuda-compile.sh -v …                   also prints registers, spills and shared memory of each kernel
#
# NVRTC comes from its Python wheels (92 MB), kept in $EBBTIDE_CUDA or target/cuda. Its version is pinned: PTX newer than the
# driver is refused by the driver, and CUDA 13.0 is the oldest that compiles for every card from Turing to Blackwell.
set -eu
cd "$(dirname "$0")/.."
version=13.0.88
runtime=13.0.96
cccl=13.0.85
cache=${EBBTIDE_CUDA:-${CARGO_TARGET_DIR:-target}/cuda}
python=$cache/bin/python3

if [ ! -e "$cache/$version" ]; then
    python3 -m venv "$cache"
    if ! "$cache/bin/pip" install -q --disable-pip-version-check --no-deps nvidia-cuda-nvrtc==$version \
        nvidia-cuda-runtime==$runtime nvidia-cuda-crt==$version nvidia-cuda-cccl==$cccl; then
        echo "cuda-compile: NVRTC $version cannot be fetched: no package registry answers. Nothing was compiled." >&2
        exit 3
    fi
    touch "$cache/$version"
fi
exec "$python" scripts/nvrtc.py "$@"
