"""Test-time augmentation: retrieval by means of images and their copies, compared with images alone.

- `flip` is the mean of each image and its mirror image, `scales` that of each image and of copies of it with 0.71 and
  1.41 times the side. Both are of test classes, which chose nothing.
- `difference` is from the images alone, paired, with its 95 % interval over classes and its p-value.
- `x images` is how many times as many pixels are embedded.

The photos are embedded by EfficientNet-Lite0 with ImageNet weights at 160 pixels, without training; at most 20 photos
of each test class are drawn. The glyphs are embedded by a run of glyphs/proxy_anchor.

Run: python benchmarks/augmented.py PHOTOS RUN. PHOTOS is a folder with one subfolder per product.
"""

import sys
from pathlib import Path
from typing import get_args

import torch
from local import untrained
from local_identification import drawn
from report import write_report

from dmlkit.distributed.launch import start_ranks
from dmlkit.embedding.in_memory import embed_dataset
from dmlkit.embedding.trained import TrainedModel, load_model
from dmlkit.evaluation.augmented import Copies, embed_with_copies
from dmlkit.loading.cache import images_of_split
from dmlkit.metrics import Labeled, score_retrieval
from dmlkit.metrics.statistics import paired_differences
from dmlkit.run_folder.folder import RunFolder

DRAWN = 20
COST = {"flip": "2", "scales": "3.5"}


def measure(name: str, trained: TrainedModel, most: int | None) -> list[list[str]]:
    """Compare the metrics of the test classes with those of the means."""
    fabric, images = start_ranks("cpu"), images_of_split(trained.recipe.dataset, "test")
    rows = None if most is None else drawn(images.labels, most).sort().values.tolist()
    own = embed_dataset(fabric, trained.model, images, trained.recipe.transform, indices=rows, workers=0)
    alone = score_retrieval(Labeled(own.points, own.labels), manifold=trained.manifold, metrics=["recall@1", "map@r"])
    found: list[list[str]] = []
    for copies in get_args(Copies):
        means = embed_with_copies(fabric, trained, images, own, copies)
        changed = score_retrieval(
            Labeled(means.points, own.labels), manifold=trained.manifold, metrics=["recall@1", "map@r"]
        )
        changes = paired_differences(alone.per_query, changed.per_query, own.labels[alone.queries])
        for metric, change in changes.items():
            values = f"{alone.values[metric]:.4f}", f"{changed.values[metric]:.4f}"
            ends = f"{change.low:+.4f} .. {change.high:+.4f}"
            row = [name, f"{len(own.labels):,}", copies, COST[copies], metric, *values, f"{change.difference:+.4f}"]
            found.append([*row, ends, f"{change.p_value:.4f}"])
    return found


def main(photos: str, run: str) -> None:
    torch.set_num_threads(1)
    rows = measure("photos", untrained(photos)[2], DRAWN)
    rows += measure("glyphs", load_model(RunFolder(Path(run)), start_ranks("cpu")), None)
    header = ["of", "images", "copies", "x images", "metric", "alone", "mean", "difference", "95 % interval", "p"]
    write_report("augmented", __doc__, header, rows)


if __name__ == "__main__":
    main(*sys.argv[1:])
