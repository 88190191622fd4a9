"""Gradient checkpointing: memory and time of forward and backward passes with `training.gradient_checkpointing`.

Images have 224 x 224 pixels: 32 of them on a CPU in float32, 256 on a GPU under bf16 autocast. `held` is what autograd
keeps from the forward to the backward pass, without the weights. `peak` is the growth of the memory of the process, or
of the GPU, during the passes, including gradients. Each model, with and without checkpointing, has its own process;
their passes alternate, and times are medians of 5 passes after a first one.
"""

import re
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
from report import write_report
from torch import Tensor, nn

from dmlkit.backbones import ResNet, Timm, ViT
from dmlkit.backbones.base import Backbone
from dmlkit.distributed.launch import start_fabric
from dmlkit.training.gradient_checkpointing import recompute_blocks
from dmlkit.training.summary import forget_peak_memory, peak_memory

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BATCH = 256 if DEVICE.type == "cuda" else 32
TURNS = 5
MEGABYTE = 2**20
BACKBONES: dict[str, Callable[[], Backbone]] = {
    "ViT-S/16": lambda: Timm("vit_small_patch16_224"),
    "ViT-B/16": ViT,
    "ResNet-50": lambda: ResNet(50),
}


class Passes:
    """A backbone in a process of its own."""

    backbone: nn.Module
    images: Tensor
    before: int


def start(name: str, recomputed: bool) -> float:
    """Build the backbone; megabytes that autograd holds for its backward pass."""
    start_fabric(DEVICE.type)
    built = BACKBONES[name]()
    if recomputed:
        recompute_blocks(built)
    Passes.backbone = built.to(DEVICE).to(memory_format=torch.channels_last).train()
    Passes.images = torch.randn(BATCH, 3, 224, 224, device=DEVICE).contiguous(memory_format=torch.channels_last)
    forget_peak_memory(DEVICE)
    Passes.before = now()
    return held() / MEGABYTE


def held() -> int:
    weights = {parameter.untyped_storage().data_ptr() for parameter in Passes.backbone.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        forward()
    return sum(kept.values())


def forward() -> Tensor:
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16, enabled=DEVICE.type == "cuda"):
        return Passes.backbone(Passes.images)


def turn() -> float:
    """Seconds of a forward and a backward pass."""
    started = time.perf_counter()
    forward().sum().backward()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def now() -> int:
    """Bytes that are taken."""
    if DEVICE.type == "cuda":
        return torch.cuda.memory_allocated()
    told = re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"))
    assert told is not None
    return 1024 * int(told[1])


def growth() -> float:
    """Megabytes at the peak beyond what there was before the first pass."""
    peak = peak_memory(DEVICE)
    assert peak is not None
    return (peak - Passes.before) / MEGABYTE


def rows_of(name: str) -> list[list[str]]:
    processes = [ProcessPoolExecutor(1, mp_context=get_context("spawn")) for _ in (False, True)]
    kept = [
        process.submit(start, name, recomputed).result()
        for process, recomputed in zip(processes, (False, True), strict=True)
    ]
    times: list[list[float]] = [[], []]
    for _ in range(1 + TURNS):
        for process, taken in zip(processes, times, strict=True):
            taken.append(process.submit(turn).result())
    peaks = [process.submit(growth).result() for process in processes]
    for process in processes:
        process.shutdown()
    seconds = [statistics.median(taken[1:]) for taken in times]
    return [
        [
            f"{name}, {BATCH} images",
            "recomputed" if index else "all kept",
            f"{kept[index]:,.0f}",
            f"{peaks[index]:,.0f}",
            f"{seconds[index]:.2f}",
            f"{seconds[index] / seconds[0]:.2f}",
        ]
        for index in (0, 1)
    ]


if __name__ == "__main__":
    rows = [row for name in BACKBONES for row in rows_of(name)]
    header = ["model", "blocks", "held, MB", "peak, MB", "s, forward and backward", "ratio"]
    write_report(f"{'gpu_' if DEVICE.type == 'cuda' else ''}gradient_checkpointing", __doc__, header, rows)
