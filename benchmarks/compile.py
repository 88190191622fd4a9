"""What `training.compile` and `training.precision=bf16` gain on a processor: training steps of EfficientNet-Lite0.

All weights are trained on batches of 64 images of 160 pixels, by the recipe `start/full_lite0`. Freed memory is kept,
as in every command. The ways take turns in one process; speeds are images per second of processor time, medians of the
steps after the first two, in which Inductor compiles.

Run: python benchmarks/compile.py [STEPS]
"""

import statistics
import sys
import time
from pathlib import Path

import torch
from report import write_report

from dmlkit.distributed.launch import Ranks, start_ranks
from dmlkit.recipe.file import read_recipe
from dmlkit.training.experiment import Experiment, assemble
from dmlkit.training.train import take_step

OVERRIDES = ["dataset={name: glyphs}", "transform.size=160", "sampler.batch_size=64"]
FIRST = 2  # steps of each way that are not timed
WAYS = {"eager, float32": (False, "fp32"), "compiled": (True, "fp32"), "eager, bf16": (False, "bf16")}
WAYS["compiled, bf16"] = (True, "bf16")


def step(experiment: Experiment, ranks: Ranks, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Take a training step and return its processor seconds."""
    started = time.process_time_ns() / 1e9
    points = ranks.compute(experiment.model, images)
    ranks.backward(experiment.objective(points, labels))
    take_step(ranks, experiment, 1, [1e-4] * len(experiment.optimizer.param_groups))
    return time.process_time_ns() / 1e9 - started


def main() -> None:
    steps = int(sys.argv[1]) if sys.argv[1:] else 6
    ways = dict[str, tuple[Experiment, Ranks]]()
    for way, (compiled, precision) in WAYS.items():
        experiment = assemble(read_recipe(Path("start/full_lite0"), OVERRIDES))
        experiment.model.train()
        if compiled:
            experiment.model.backbone.compile()
        ways[way] = experiment, start_ranks("cpu", precision)
    images = torch.randint(0, 256, (64, 3, 160, 160), dtype=torch.uint8).to(memory_format=torch.channels_last)
    labels = torch.arange(64) % len(ways["compiled"][0].train.class_names)
    before, seconds = dict[str, float](), {way: list[float]() for way in ways}
    for way, (experiment, ranks) in ways.items():
        started = time.perf_counter()
        for _ in range(FIRST):
            step(experiment, ranks, images, labels)
        before[way] = time.perf_counter() - started
    for _ in range(steps):
        for way, (experiment, ranks) in ways.items():
            seconds[way].append(step(experiment, ranks, images, labels))
    speeds = {way: 64 / statistics.median(of_way) for way, of_way in seconds.items()}
    eager = speeds["eager, float32"]
    rows = [
        [way, f"{speed:.1f}", f"{64 / max(seconds[way]):.1f} .. {64 / min(seconds[way]):.1f}", f"{speed / eager:.2f}"]
        for way, speed in speeds.items()
    ]
    rows = [[*row, f"{before[row[0]]:.0f}"] for row in rows]
    write_report("compile", __doc__, ["training step", "images/s", "range", "ratio", "first two steps, s"], rows)


if __name__ == "__main__":
    main()
