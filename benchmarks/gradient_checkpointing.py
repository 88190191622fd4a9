"""Gradient checkpointing: memory and time of forward and backward passes with `training.gradient_checkpointing`.

Images have 224 x 224 pixels: 32 of them on a CPU in float32, 256 on a GPU under bf16 autocast. `held` is what autograd
keeps from the forward to the backward pass, without the weights. `peak` is the growth of the memory of the process, or
of the GPU, during the passes, including gradients. Each model, with and without checkpointing, has its own process;
their passes alternate, and times are medians of 5 passes after a first one.

`--cache` measures `training.gradient_cache` instead (gradient_cache.md): the network of the glyphs with 256 images of
32 x 32, in one pass and in chunks of 32, with CPU time in place of time, medians of 3.
"""

import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch
from report import resident_megabytes, write_report
from torch import Tensor, nn

from dmlkit.backbones import ResNet50, SmallCNN, Timm, ViT
from dmlkit.backbones.base import Backbone
from dmlkit.distributed.launch import start_ranks
from dmlkit.training.gradient_checkpointing import recompute_blocks, recompute_chunks
from dmlkit.training.summary import forget_peak_memory, peak_memory

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
OF_CACHE = sys.argv[1:] == ["--cache"]
BATCH, SIDE = (256, 32) if OF_CACHE else (256 if DEVICE.type == "cuda" else 32, 224)
TURNS = 3 if OF_CACHE else 5
MEGABYTE = 2**20
BACKBONES: dict[str, Callable[[], Backbone]] = {
    "ViT-S/16": lambda: Timm(model="vit_small_patch16_224"),
    "ViT-B/16": ViT,
    "ResNet-50": ResNet50,
    "small_cnn": lambda: SmallCNN(width=32),
}
MODELS = ["small_cnn"] if OF_CACHE else ["ViT-S/16", "ViT-B/16", "ResNet-50"]
WAYS: dict[str, Callable[[Backbone], None]] = {
    "all kept": lambda _: None,
    **(
        {"chunks of 32": lambda backbone: recompute_chunks(backbone, 32)}
        if OF_CACHE
        else {"recomputed": recompute_blocks}
    ),
}


class Passes:
    """A backbone in a process of its own."""

    backbone: nn.Module
    images: Tensor
    before: int


def start(name: str, way: str) -> float:
    """Build the backbone; megabytes that autograd holds for its backward pass."""
    start_ranks(DEVICE.type)
    built = BACKBONES[name]()
    WAYS[way](built)
    Passes.backbone = built.to(DEVICE).to(memory_format=torch.channels_last).train()
    Passes.images = torch.randn(BATCH, 3, SIDE, SIDE, device=DEVICE).contiguous(memory_format=torch.channels_last)
    forget_peak_memory(DEVICE)
    Passes.before = now()
    return held() / MEGABYTE


def held() -> int:
    weights = {parameter.untyped_storage().data_ptr() for parameter in Passes.backbone.parameters()}
    sizes: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        forward()
    return sum(sizes.values())


def forward() -> Tensor:
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16, enabled=DEVICE.type == "cuda"):
        return Passes.backbone(Passes.images)


def turn() -> float:
    """Seconds of a forward and a backward pass."""
    clock = time.process_time if OF_CACHE and DEVICE.type == "cpu" else time.perf_counter
    started = clock()
    forward().sum().backward()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return clock() - started


def now() -> int:
    """Bytes that are taken."""
    if DEVICE.type == "cuda":
        return torch.cuda.memory_allocated()
    return round(2**20 * resident_megabytes("VmRSS"))


def growth() -> float:
    """Megabytes at the peak beyond what there was before the first pass."""
    peak = peak_memory(DEVICE)
    assert peak is not None
    return (peak - Passes.before) / MEGABYTE


def rows_of(name: str) -> list[list[str]]:
    processes = {way: ProcessPoolExecutor(1, mp_context=get_context("spawn")) for way in WAYS}
    megabytes = {way: process.submit(start, name, way).result() for way, process in processes.items()}
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(1 + TURNS):
        for way, process in processes.items():
            times[way].append(process.submit(turn).result())
    peaks = {way: process.submit(growth).result() for way, process in processes.items()}
    for process in processes.values():
        process.shutdown()
    seconds = {way: statistics.median(taken[1:]) for way, taken in times.items()}
    return [
        [
            f"{name}, {BATCH} images",
            way,
            f"{megabytes[way]:,.0f}",
            f"{peaks[way]:,.0f}",
            f"{seconds[way]:.2f}",
            f"{seconds[way] / seconds['all kept']:.2f}",
        ]
        for way in WAYS
    ]


if __name__ == "__main__":
    rows = [row for name in MODELS for row in rows_of(name)]
    header = ["model", "kept", "held, MB", "peak, MB", "s, forward and backward", "ratio"]
    report_name = "gradient_cache" if OF_CACHE else "gradient_checkpointing"
    write_report(f"{'gpu_' if DEVICE.type == 'cuda' else ''}{report_name}", __doc__, header, rows)
