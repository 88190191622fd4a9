"""Overhead of `dmlkit train`: images/s compared with a bare PyTorch loop, in one process.

Both train the demo's model with the same loss, batches and optimizer on the same glyphs. Epochs alternate between the
two, so that fluctuations of the machine affect both; values are medians over epochs.

Run: python benchmarks/training_loop.py
"""

import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from report import write_report

from dmlkit.distributed.launch import start_ranks
from dmlkit.losses import ProxyAnchor
from dmlkit.model import build_model
from dmlkit.recipe.file import read_recipe
from dmlkit.recipe.schema import Recipe
from dmlkit.training.train import train

ROUNDS, EPOCHS = 5, 2


def recipe() -> Recipe:
    overrides = ["dataset.validation_fraction=0", f"training.epochs={EPOCHS}"]
    return read_recipe(Path(__file__).parent.parent / "recipes" / "glyphs" / "proxy_anchor.yaml", overrides)


class BareLoop:
    """The same training without dmlkit's loop: images in one tensor, sliced by index."""

    def __init__(self) -> None:
        settings = recipe()
        self.data = settings.dataset.build("train")
        self.images = torch.stack([self.data.sample(index) for index in range(len(self.data))])
        torch.manual_seed(0)
        self.model = build_model(settings)
        self.loss = ProxyAnchor(self.model.manifold, len(self.data.class_names))
        groups = [{"params": self.model.parameters()}, {"params": self.loss.parameters(), "lr": 2e-2}]
        self.optimizer = torch.optim.AdamW(groups, lr=2e-3, weight_decay=1e-4)
        self.sampler = settings.sampler.build(self.data.labels, 0)

    def epochs(self) -> list[float]:
        speeds: list[float] = []
        for epoch in range(EPOCHS):
            started = time.perf_counter()
            for batch in self.sampler.batches(epoch):
                self.optimizer.zero_grad()
                self.loss(self.model(self.images[batch]), self.data.labels[batch]).backward()
                self.optimizer.step()
            speeds.append(len(self.sampler) * self.sampler.batch_size / (time.perf_counter() - started))
        return speeds


def dmlkit_epochs() -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        train(recipe(), run, device=start_ranks("cpu"))
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        return [row["images_per_second"] for row in rows]


def main() -> None:
    bare_loop = BareLoop()
    bare, ours = [], []
    for _ in range(ROUNDS):
        bare += bare_loop.epochs()
        ours += dmlkit_epochs()
    fastest, median = max(bare), statistics.median(bare)
    rows = [
        ["bare PyTorch loop", f"{median:.0f}", f"{fastest:.0f}", "1.00"],
        [
            "dmlkit train",
            f"{statistics.median(ours):.0f}",
            f"{max(ours):.0f}",
            f"{statistics.median(ours) / median:.3f}",
        ],
    ]
    write_report("training_loop", __doc__, ["loop", "images/s, median", "images/s, best", "ratio of medians"], rows)


if __name__ == "__main__":
    main()
