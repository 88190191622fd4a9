"""Calibration: how often the interval of a calibrated threshold contains the false accept rate (FAR) on other classes.

The classes are divided at random into two halves, 200 times. A threshold is chosen on one half, and its FAR is measured
on the other half. The column `covered` is the share of repetitions in which this FAR lies in the stated 95 % interval.
`clusters` are synthetic: 80 classes of 2 to 200 images, whose centers form groups that are easily confused. `photos`
are all products of the Grocery Store data set, embedded by EfficientNet-Lite0 with ImageNet weights at 224 pixels.

Run: python benchmarks/calibration.py [PHOTOS]. PHOTOS is a folder with one subfolder per product; without it no report
is written.
"""

import sys
import tempfile
from pathlib import Path
from statistics import median

import torch
from report import write_report

from dmlkit.distributed.launch import start_ranks
from dmlkit.evaluation.calibration import calibrate_pairs, rates_at
from dmlkit.manifolds import Sphere
from dmlkit.metrics.base import Points
from dmlkit.metrics.pairing import Pairing
from dmlkit.metrics.ranking.rankings import as_directions
from dmlkit.model import build_model
from dmlkit.recipe.file import read_recipe
from dmlkit.training.progress import Silent
from dmlkit.vectors.features import feature_job, frozen_part

HALVES = 200


def clusters(classes: int = 80, width: int = 64, groups: int = 12, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = (2 * 100 ** torch.rand(classes, generator=generator)).long()
    labels = torch.arange(classes).repeat_interleave(sizes)
    kinds = torch.randn(groups, width, generator=generator)
    centers = kinds[torch.randint(groups, (classes,), generator=generator)] + 0.9 * torch.randn(
        classes, width, generator=generator
    )
    spread = 0.4 + 0.6 * torch.rand(classes, 1, generator=generator)
    return centers[labels] + spread[labels] * torch.randn(len(labels), width, generator=generator), labels


def photo_features(photos: str) -> tuple[torch.Tensor, torch.Tensor]:
    recipe = Path(__file__).parent.parent / "recipes" / "start" / "frozen_lite0.yaml"
    settings = read_recipe(recipe, [f"dataset.root={photos}"])
    dataset, model = settings.dataset.build("all"), build_model(settings).eval()
    with tempfile.TemporaryDirectory() as folder:
        ranks, bar = start_ranks("cpu"), Silent().images
        job = feature_job(dataset, frozen_part(settings, model, ranks.device), split="all")
        features = job.compute(Path(folder), ranks, bar)
        return torch.stack([features.sample(row) for row in range(len(features))]), dataset.labels


def coverage(name: str, features: torch.Tensor, labels: torch.Tensor, far: float) -> list[str]:
    manifold = Sphere(features.shape[1])
    points = as_directions(features, "embeddings")
    generator = torch.Generator().manual_seed(1)
    classes = int(labels.max()) + 1
    covered, ratios, rates = 0, list[float](), list[float]()
    for seed in range(HALVES):
        chosen = torch.zeros(classes, dtype=torch.bool)
        chosen[torch.randperm(classes, generator=generator)[: classes // 2]] = True
        sides: list[Points] = []
        for mask in (chosen[labels], ~chosen[labels]):
            sides.append(Points(points[mask], labels[mask].unique(return_inverse=True)[1], manifold))
        calibration = calibrate_pairs(Pairing.of(sides[0]), far, seed=seed)
        rate = rates_at(Pairing.of(sides[1]), calibration.threshold).far
        if calibration.interval is None:
            raise ValueError(f"{name}: too few classes for an interval; expected at least 10, 5 on each side")
        low, high = calibration.interval
        covered += low <= rate <= high
        ratios.append(high / max(low, 1e-12))
        rates.append(rate)
    row = [
        f"{name}: {len(points):,} of {classes} classes",
        f"{far:g}",
        f"{covered / HALVES:.1%}",
        f"{median(rates):.1e} ({min(rates):.1e} to {max(rates):.1e})",
        f"{median(ratios):.1f}",
    ]
    print(" | ".join(row), flush=True)
    return row


if __name__ == "__main__":
    grounds = {"clusters": clusters()}
    if len(sys.argv) > 1:
        grounds["photos"] = photo_features(sys.argv[1])
    rows = [coverage(name, *arrays, far) for name, arrays in grounds.items() for far in (1e-2, 1e-3)]
    if len(sys.argv) > 1:
        header = ["images", "target FAR", "covered", "measured FAR, median (all)", "interval, high / low"]
        write_report("calibration", __doc__, header, rows)
