"""Frozen backbone on photos: time per epoch compared with full tuning, and feature computation with a bare loop.

The model is EfficientNet-Lite0 with ImageNet weights at 224 pixels, on the photos of the Grocery Store data set, in one
process. The recipes are `recipes/start/frozen_lite0.yaml` and `full_lite0.yaml`; epochs with the frozen backbone do not
include the computation of features. The bare loop reads the same photos with Pillow, torchvision's transforms and a
DataLoader with the same number of worker processes, and runs the same model without gradients. Rounds alternate between
the two; values are medians over rounds.

Run: python benchmarks/frozen.py PHOTOS. PHOTOS is a folder with one subfolder per product.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from report import write_report
from torch.utils.data import DataLoader
from torchvision import transforms

from dmlkit.distributed.launch import start_fabric
from dmlkit.embedding.features import cached_features
from dmlkit.model import build_model
from dmlkit.recipe.file import read_recipe
from dmlkit.recipe.schema import Recipe
from dmlkit.training.progress import Silent
from dmlkit.training.train import train

ROUNDS, EPOCHS, BATCH, WORKERS = 3, 20, 128, min(8, os.cpu_count() or 1)


def recipe(name: str, photos: str, **keys: Any) -> Recipe:
    overrides = [f"dataset.root={photos}", *(f"{key.replace('__', '.')}={value}" for key, value in keys.items())]
    return read_recipe(Path(__file__).parent.parent / "recipes" / "start" / f"{name}_lite0.yaml", overrides)


def seconds_per_epoch(settings: Recipe, folder: Path) -> float:
    """The median over the epochs of a training, without validation."""
    train(settings, folder, device=start_fabric("cpu"))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return statistics.median(row["training_seconds"] for row in rows)


class Photos(torch.utils.data.Dataset[torch.Tensor]):
    """Photos as torchvision prepares them."""

    def __init__(self, paths: Sequence[str], settings: Any) -> None:
        self.paths = paths
        self.transform: Any = transforms.Compose(
            [
                transforms.Resize(settings.resize, transforms.InterpolationMode.BICUBIC),
                transforms.CenterCrop(settings.size),
                transforms.ToTensor(),
                transforms.Normalize(settings.mean, settings.std),
            ]
        )

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> torch.Tensor:
        with Image.open(self.paths[index]) as image:
            return self.transform(image.convert("RGB"))


class Features:
    """Both ways from the training photos to a file of features; each gives images a second."""

    def __init__(self, settings: Recipe) -> None:
        self.settings, self.dataset = settings, settings.dataset.build("train")
        self.model, self.fabric = build_model(settings).eval(), start_fabric("cpu")

    def bare(self, folder: Path) -> float:
        started, path = time.perf_counter(), folder / "features.npy"
        photos = Photos(self.dataset.paths, self.settings.transform)
        features = np.lib.format.open_memmap(path, "w+", np.float32, (len(photos), self.model.backbone.num_features))
        done = 0
        with torch.inference_mode():
            for batch in DataLoader(photos, BATCH, num_workers=WORKERS):
                features[done : done + len(batch)] = self.model.backbone(batch).numpy()
                done += len(batch)
        features.flush()
        return done / (time.perf_counter() - started)

    def ours(self, folder: Path) -> float:
        started = time.perf_counter()
        found = cached_features(
            self.dataset, self.settings, self.model, self.fabric, folder, views=0, bar=Silent().images, split="train"
        )
        return len(found) / (time.perf_counter() - started)


def main() -> None:
    photos = sys.argv[1]
    frozen, full = recipe("frozen", photos, training__epochs=EPOCHS), recipe("full", photos, training__epochs=1)
    features, rates = Features(frozen), {"bare": [], "ours": []}
    with tempfile.TemporaryDirectory() as place:
        for number in range(ROUNDS):
            for name, seen in rates.items():
                folder = Path(place) / f"{name}-{number}"
                folder.mkdir()
                seen.append(getattr(features, name)(folder))
        head = seconds_per_epoch(frozen, Path(place) / "frozen")
        whole = seconds_per_epoch(full, Path(place) / "full")
    bare, ours = (statistics.median(rates[name]) for name in ("bare", "ours"))
    rows = [
        ["an epoch of full tuning", f"{whole:.1f} s", "1"],
        ["an epoch of the head, features cached", f"{head:.2f} s", f"1/{whole / head:.0f}"],
        ["features by a bare loop", f"{bare:.1f} images/s", "1.00"],
        ["features by dmlkit", f"{ours:.1f} images/s", f"{ours / bare:.3f}"],
    ]
    write_report("frozen", __doc__, [f"{len(features.dataset)} training photos", "median", "ratio"], rows)


if __name__ == "__main__":
    main()
