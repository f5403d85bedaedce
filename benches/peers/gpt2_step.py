"""One training step of GPT-2 in PyTorch: the yardstick of `cargo bench --bench gpt2`.

    gpt2_step.py BATCH CONTEXT STEPS THREADS [none|compile|checkpoint|save_on_cpu|int8|disk] [cpu|cuda] [f32|f16|bf16]

Forward, backward and AdamW in f32, or under autocast in 16 bits (f16 with GradScaler), with random weights and tokens, scaled-dot-product attention, tanh GELU and a tied head.
Prints one JSON object: the median seconds of STEPS steps after one to warm up, the bytes that autograd saves for backward
(parameters excluded, each storage counted once), and the peak of the process's resident memory during a step less what
was resident before it; on cuda, of what its allocator gave out. What is saved for backward stays, or goes as the policy says: `torch.utils.checkpoint` a block,
`save_on_cpu` (on cuda to pinned memory), or hooks on saved tensors that store them as int8 in groups of 128 or in files. `compile` is `torch.compile` with flash attention, for cuda. Needs torch.
"""

import contextlib
import json
import os
import statistics
import sys
import tempfile
import time

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

LAYERS, WIDTH, HEADS, VOCABULARY = 12, 768, 12, 50257


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        batch, context, _ = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, context, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, context, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Gpt2(nn.Module):
    def __init__(self, context):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(context, WIDTH)
        self.blocks, self.norm = nn.Sequential(*(Block() for _ in range(LAYERS))), nn.LayerNorm(WIDTH)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, 0.0, 0.02)

    def forward(self, tokens, targets, recompute):
        x = self.tokens(tokens) + self.positions.weight
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
        x = self.norm(x)
        return F.cross_entropy(F.linear(x, self.tokens.weight).flatten(0, 1), targets.flatten())


def resident(key):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(key))


SMALLEST = 4096  # Elements of a tensor that a hook takes.


def as_int8(parameters):
    def pack(tensor):
        if tensor.dtype != torch.float32 or tensor.numel() < SMALLEST or tensor.untyped_storage().data_ptr() in parameters:
            return tensor
        groups = F.pad(tensor.reshape(-1), (0, -tensor.numel() % 128)).view(-1, 128)
        scales = groups.abs().amax(1, keepdim=True).div_(127).clamp_(min=1e-30)
        return (groups / scales).round_().to(torch.int8), scales, tensor.shape

    def unpack(stored):
        if torch.is_tensor(stored):
            return stored
        codes, scales, shape = stored
        return (codes * scales).view(-1)[: shape.numel()].view(shape)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def in_files(parameters, folder):
    def pack(tensor):
        if tensor.numel() < SMALLEST or tensor.untyped_storage().data_ptr() in parameters:
            return tensor
        handle, path = tempfile.mkstemp(dir=folder)
        with os.fdopen(handle, "wb") as file:
            tensor.detach().contiguous().numpy().tofile(file)
        return path, tensor.shape, tensor.dtype

    def unpack(stored):
        if torch.is_tensor(stored):
            return stored
        path, shape, dtype = stored
        tensor = torch.from_file(path, size=shape.numel(), dtype=dtype).clone().view(shape)
        os.unlink(path)
        return tensor

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def main():
    batch, context, steps, threads = map(int, sys.argv[1:5])
    policy, device, precision = (sys.argv[5:] + ["none", "cpu", "f32"][len(sys.argv) - 5:])[:3]
    dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[precision]
    on_card = device != "cpu"
    folder = tempfile.TemporaryDirectory()
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    model = Gpt2(context).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=on_card)
    scaler = torch.amp.GradScaler(device.split(":")[0], enabled=precision == "f16")
    tokens = torch.randint(0, VOCABULARY, (batch, context + 1), device=device)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    hooks = {
        "save_on_cpu": lambda: torch.autograd.graph.save_on_cpu(pin_memory=on_card),
        "int8": lambda: as_int8(parameters),
        "disk": lambda: in_files(parameters, folder.name),
    }.get(policy, contextlib.nullcontext)
    recompute = policy == "checkpoint"
    run = torch.compile(model) if policy == "compile" else model
    flash = [SDPBackend.FLASH_ATTENTION] if policy == "compile" and dtype != torch.float32 else []

    def forward():
        with torch.autocast(device.split(":")[0], dtype, enabled=dtype != torch.float32):
            return run(inputs, targets, recompute)

    def step():
        optimizer.zero_grad(set_to_none=True)
        with hooks(), sdpa_kernel(flash) if flash else contextlib.nullcontext():
            loss = forward()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if on_card:
            torch.cuda.synchronize()

    for _ in range(3 if on_card else 1):
        step()
    seconds, peaks = [], []
    for _ in range(steps):
        if on_card:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        else:
            with open("/proc/self/clear_refs", "w") as clear:
                clear.write("5")
            before = resident("VmRSS")
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
        peaks.append((torch.cuda.max_memory_allocated() if on_card else resident("VmHWM")) - before)
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    print(json.dumps({
        "seconds_per_step": statistics.median(seconds),
        "saved_bytes": sum(saved.values()) if policy in ("none", "compile", "checkpoint") else 0,
        "peak_step_bytes": max(peaks),
        "version": torch.__version__,
    }))


main()
