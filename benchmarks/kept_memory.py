"""What it gains that commands keep freed memory: steps of EfficientNet-Lite0 on a processor.

A training step has 120 images of 160 pixels, a pass without gradients 128 of 224, all weights, one thread. Each line is
the median of 3 processes, which take turns; speeds are images per second of processor time, after a first step.

Run: python benchmarks/kept_memory.py
"""

import resource
import statistics
import sys
from collections import defaultdict
from subprocess import run

import timm
import torch
from report import write_report

from dmlkit.distributed.launch import keep_freed_memory

TURNS, STEPS = 3, 4


def measure(work: str, allocator: str) -> tuple[float, float, float]:
    """Images per second of processor time, the share of the system in it, and the largest memory in GB."""
    if allocator == "kept":
        keep_freed_memory()
    torch.set_num_threads(1)
    network = timm.create_model("tf_efficientnet_lite0", num_classes=0).eval().to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4)
    size, batch = (160, 120) if work == "training" else (224, 128)
    images = torch.rand(batch, 3, size, size).contiguous(memory_format=torch.channels_last)

    def step() -> None:
        with torch.set_grad_enabled(work == "training"):
            loss = network(images).square().mean()
        if work == "training":
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    step()
    before = resource.getrusage(resource.RUSAGE_SELF)
    for _ in range(STEPS):
        step()
    after = resource.getrusage(resource.RUSAGE_SELF)
    system = after.ru_stime - before.ru_stime
    seconds = after.ru_utime - before.ru_utime + system
    return STEPS * batch / seconds, system / seconds, after.ru_maxrss / 1e6


def main() -> None:
    if len(sys.argv) == 3:
        print(*measure(sys.argv[1], sys.argv[2]))
        return
    values: dict[tuple[str, str], list[list[float]]] = defaultdict(list)
    for _ in range(TURNS):
        for work in ("training", "embedding"):
            for allocator in ("returned", "kept"):
                process = run([sys.executable, __file__, work, allocator], capture_output=True, text=True, check=True)
                values[work, allocator].append([float(word) for word in process.stdout.split()])
    table = list[list[str]]()
    for (work, allocator), all_turns in values.items():
        speed, system, memory = (statistics.median(column) for column in zip(*all_turns, strict=True))
        table.append([work, allocator, f"{speed:.1f}", f"{system:.0%}", f"{memory:.1f}"])
    write_report(
        "kept_memory", __doc__ or "", ["work", "freed memory", "images/s", "of the time in the system", "GB"], table
    )


if __name__ == "__main__":
    main()
