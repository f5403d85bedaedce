"""Compiles .cu files to PTX with NVRTC's C interface. Called by cuda-compile.sh, which has the usage."""

import argparse
import ctypes
import glob
import os
import re
import sys
import sysconfig

TEST_KERNELS = ["tests/sim/ptx/tests/kernels/*.cu", "tests/sim/cuda/tests/kernels/*.cu"]


def libraries():
    """NVRTC and the folders of CUDA's headers, as the wheels lay them out."""
    root = os.path.join(sysconfig.get_path("purelib"), "nvidia", "cu13")
    # NVRTC does not find its own builtins by itself: they are opened first, by path.
    for builtins in glob.glob(f"{root}/lib/libnvrtc-builtins.so.*[0-9]"):
        ctypes.CDLL(builtins, ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(f"{root}/lib/libnvrtc.so.13"), [f"{root}/include", f"{root}/include/cccl"]


def text(nvrtc, program, kind):
    """The program's log or PTX."""
    size = ctypes.c_size_t()
    check(nvrtc, getattr(nvrtc, f"nvrtcGet{kind}Size")(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(max(size.value, 1))
    check(nvrtc, getattr(nvrtc, f"nvrtcGet{kind}")(program, buffer))
    return buffer.value.decode()


def check(nvrtc, code):
    if code:
        nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
        sys.exit("cuda-compile: " + nvrtc.nvrtcGetErrorString(code).decode())


def compile_file(nvrtc, includes, path, architecture, verbose):
    """The PTX of `path` for `architecture`, such as "80"; the compiler's log goes to stderr, and an error ends the run."""
    program = ctypes.c_void_p()
    with open(path, "rb") as file:
        source = file.read()
    check(nvrtc, nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, os.path.basename(path).encode(), 0, None, None))
    options = [f"--gpu-architecture=sm_{architecture}", "--std=c++17", "-lineinfo", "-I" + os.path.dirname(path)]
    options += [f"-I{folder}" for folder in includes]
    if verbose:
        options.append("--ptxas-options=-v")
    encoded = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
    code = nvrtc.nvrtcCompileProgram(program, len(options), encoded)
    log = text(nvrtc, program, "ProgramLog").strip()
    if log:
        print(log, file=sys.stderr)
    if code:
        sys.exit(f"cuda-compile: {path} does not compile for sm_{architecture}")
    ptx = text(nvrtc, program, "PTX")
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    # Source files by name alone: the PTX is the same wherever it was compiled.
    return re.sub(r'(\.file\s+\d+ )".*/', r'\1"', ptx)


def main():
    parser = argparse.ArgumentParser(prog="cuda-compile.sh")
    parser.add_argument("-a", "--architectures", default="80")
    parser.add_argument("-o", "--out", help="folder of the PTX; without it, NAME.ptx beside NAME.cu")
    parser.add_argument("-v", "--verbose", action="store_true")
    parser.add_argument("files", nargs="*")
    arguments = parser.parse_args()
    files = arguments.files or sorted(path for pattern in TEST_KERNELS for path in glob.glob(pattern))
    architectures = arguments.architectures.split(",")
    if not arguments.out and len(architectures) > 1:
        sys.exit("cuda-compile: several architectures need --out")
    nvrtc, includes = libraries()
    for path in files:
        for architecture in architectures:
            ptx = compile_file(nvrtc, includes, path, architecture, arguments.verbose)
            name = os.path.basename(path).removesuffix(".cu")
            out = f"{arguments.out}/{name}.sm_{architecture}.ptx" if arguments.out else path.removesuffix(".cu") + ".ptx"
            if arguments.out:
                os.makedirs(arguments.out, exist_ok=True)
            with open(out, "w") as file:
                file.write(ptx)
            print(f"{path}: sm_{architecture}, {len(ptx)} bytes to {out}")


main()
