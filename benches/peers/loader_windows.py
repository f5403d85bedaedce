"""Random windows of a file of u16 tokens by PyTorch: the yardstick of `cargo bench --bench loader`.

    loader_windows.py FILE CONTEXT BATCH SECONDS KIND [warm]

KIND is `get_batch` (nanoGPT's: windows of a memory map at random places, stacked) or `dataloader-N` (torch's DataLoader with
shuffle over the map's windows, N workers). The map is advised MADV_RANDOM, without which the same reads are a hundred times
slower under a memory limit; the file is dropped from the page cache first, unless `warm`. Prints one JSON object. Needs torch
and numpy.
"""

import json
import mmap
import os
import sys
import time

import numpy
import torch

FILE, CONTEXT, BATCH, SECONDS, KIND = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), sys.argv[5]


def tokens():
    map = numpy.memmap(FILE, dtype=numpy.uint16, mode="r")
    map._mmap.madvise(mmap.MADV_RANDOM)
    return map


class Windows(torch.utils.data.Dataset):
    def __init__(self):
        self.tokens = None

    def __len__(self):
        return (os.path.getsize(FILE) // 2 - 1) // CONTEXT

    def __getitem__(self, i):
        if self.tokens is None:
            self.tokens = tokens()
        return torch.from_numpy(self.tokens[i * CONTEXT : i * CONTEXT + CONTEXT + 1].astype(numpy.int64))


def get_batch():
    map = tokens()
    last = len(map) - CONTEXT
    while True:
        starts = torch.randint(last, (BATCH,))
        yield torch.stack([torch.from_numpy(map[i : i + CONTEXT + 1].astype(numpy.int64)) for i in starts])


def epochs(loader):
    while True:
        yield from loader


if __name__ == "__main__":
    if "warm" not in sys.argv:
        with open(FILE, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if KIND == "get_batch":
        batches = get_batch()
    else:
        workers = int(KIND.rpartition("-")[2])
        loader = torch.utils.data.DataLoader(Windows(), BATCH, shuffle=True, num_workers=workers, persistent_workers=workers > 0)
        batches = epochs(loader)
    # Workers start and the permutation is made before the clock runs.
    next(batches)
    windows, start = 0, time.perf_counter()
    while (seconds := time.perf_counter() - start) < SECONDS:
        windows += len(next(batches))
    rate = windows / seconds
    print(json.dumps({"windows_per_second": rate, "bytes_per_second": rate * CONTEXT * 2}))
