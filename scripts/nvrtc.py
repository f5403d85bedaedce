"""Compiles .cu files to PTX with NVRTC's C interface. Called by cuda-compile.sh, which has the usage."""

import argparse
import ctypes
import glob
import os
import re
import sys
import sysconfig

TEST_KERNELS = "tests/sim/ptx/tests/kernels/*.cu"
KERNELS = "kernels/cuda/*.cu"
PTX = "kernels/cuda/ptx"
# What the kernels take of a multiprocessor, from the oldest architecture with what they need to the newest that NVRTC knows.
TABLE = "kernels/cuda/resources.tsv"
TABLE_ARCHITECTURES = ["80", "90", "120"]


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


def compile_file(nvrtc, includes, path, architecture):
    """The PTX of `path` for `architecture`, such as "80", and the compiler's log; an error ends the run."""
    program = ctypes.c_void_p()
    with open(path, "rb") as file:
        source = file.read()
    check(nvrtc, nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, os.path.basename(path).encode(), 0, None, None))
    options = [f"--gpu-architecture=sm_{architecture}", "--std=c++17", "-lineinfo", "-I" + os.path.dirname(path)]
    options += [f"-I{folder}" for folder in includes]
    options.append("--ptxas-options=-v")
    encoded = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
    code = nvrtc.nvrtcCompileProgram(program, len(options), encoded)
    log = text(nvrtc, program, "ProgramLog").strip()
    if code:
        print(log, file=sys.stderr)
        sys.exit(f"cuda-compile: {path} does not compile for sm_{architecture}")
    ptx = text(nvrtc, program, "PTX")
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    # Source files by name alone: the PTX is the same wherever it was compiled.
    return re.sub(r'(\.file\s+\d+ )".*/', r'\1"', ptx), log


def resources(log):
    """Of each kernel of a log: registers a thread, bytes spilled, bytes of shared memory."""
    for entry in log.split("Compiling entry function")[1:]:
        name = re.search(r"'(\w+)'", entry).group(1)
        number = lambda pattern: int((re.search(pattern, entry) or ["", "0"])[1])
        spilled = number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads")
        yield name, number(r"Used (\d+) registers"), spilled, number(r"(\d+) bytes smem")


def checked_in(nvrtc, includes):
    """Path and text of everything that is made from kernels and checked in."""
    for path in sorted(glob.glob(TEST_KERNELS)):
        yield path.removesuffix(".cu") + ".ptx", compile_file(nvrtc, includes, path, "80")[0]
    rows = []
    for path in sorted(glob.glob(KERNELS)):
        for architecture in TABLE_ARCHITECTURES:
            ptx, log = compile_file(nvrtc, includes, path, architecture)
            rows += [(kernel, f"sm_{architecture}", *of_kernel) for kernel, *of_kernel in resources(log)]
            if architecture == "80":
                yield f"{PTX}/{os.path.basename(path).removesuffix('.cu')}.sm_80.ptx", ptx
    spilling = [row for row in rows if row[3]]
    if spilling:
        sys.exit(f"cuda-compile: these kernels spill registers: {spilling}")
    header = ("kernel", "architecture", "registers", "spilled bytes", "shared bytes")
    yield TABLE, "".join("\t".join(map(str, row)) + "\n" for row in [header, *sorted(rows)])


def compiles(nvrtc, includes):
    """Compiles everything that is checked in, by whatever NVRTC this is: another's PTX need not be the same."""
    print(f"cuda-compile: {len(list(checked_in(nvrtc, includes)))} files compile, without spills")


def update(nvrtc, includes, check_only):
    """Writes what is checked in, or names what is not what its source gives."""
    stale = []
    for path, made in checked_in(nvrtc, includes):
        before = open(path).read() if os.path.exists(path) else None
        if before == made:
            continue
        stale.append(path)
        if path == TABLE and before:
            old, new = set(before.splitlines()), set(made.splitlines())
            print("\n".join([f"- {row}" for row in sorted(old - new)] + [f"+ {row}" for row in sorted(new - old)]))
        if not check_only:
            with open(path, "w") as file:
                file.write(made)
            print(f"{path}: written")
    if check_only and stale:
        sys.exit(f"cuda-compile: not what the kernels' sources give: {', '.join(stale)}. scripts/cuda-compile.sh writes them anew.")
    print(f"cuda-compile: {len(stale)} files differed")


def main():
    parser = argparse.ArgumentParser(prog="cuda-compile.sh")
    parser.add_argument("-a", "--architectures", default="80")
    parser.add_argument("-o", "--out", help="folder of the PTX; without it, NAME.ptx beside NAME.cu")
    parser.add_argument("-v", "--verbose", action="store_true")
    parser.add_argument("files", nargs="*")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if what is checked in is not what its source gives")
    parser.add_argument("--compiles", action="store_true", help="write and compare nothing; fail if a kernel does not compile, or spills registers")
    arguments = parser.parse_args()
    if arguments.compiles:
        return compiles(*libraries())
    if not arguments.files:
        return update(*libraries(), arguments.check)
    architectures = arguments.architectures.split(",")
    if not arguments.out and len(architectures) > 1:
        sys.exit("cuda-compile: several architectures need --out")
    nvrtc, includes = libraries()
    for path in arguments.files:
        for architecture in architectures:
            ptx, log = compile_file(nvrtc, includes, path, architecture)
            if arguments.verbose:
                print(log, file=sys.stderr)
            name = os.path.basename(path).removesuffix(".cu")
            out = f"{arguments.out}/{name}.sm_{architecture}.ptx" if arguments.out else path.removesuffix(".cu") + ".ptx"
            if arguments.out:
                os.makedirs(arguments.out, exist_ok=True)
            with open(out, "w") as file:
                file.write(ptx)
            print(f"{path}: sm_{architecture}, {len(ptx)} bytes to {out}")


main()
