"""Calibration: how often the interval of a threshold holds the false accept rate that other classes show.

Of an array of embeddings, the classes are halved at random 200 times. A threshold is chosen on one half, and its false
accept rate is measured on the other; the share of halves in which it lies in the stated interval is told.

    python benchmarks/calibration.py [EMBEDDINGS.npy LABELS.npy]

Without arrays, clusters of unequal classes are drawn: sizes from 2 to 200, centres in groups that are easily confused.
"""

import sys
from statistics import median

import numpy as np
import torch

from dmlkit.evaluation.calibration import calibrate_points, rates_at
from dmlkit.manifolds import Sphere
from dmlkit.metrics.base import Points
from dmlkit.metrics.pairs.pairing import Pairing
from dmlkit.metrics.ranking.inputs import as_keys, as_points

HALVES = 200


def clusters(classes: int = 80, width: int = 64, groups: int = 12, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = (2 * 100 ** torch.rand(classes, generator=generator)).long()
    labels = torch.arange(classes).repeat_interleave(sizes)
    kinds = torch.randn(groups, width, generator=generator)
    centres = kinds[torch.randint(groups, (classes,), generator=generator)] + 0.9 * torch.randn(
        classes, width, generator=generator
    )
    spread = 0.4 + 0.6 * torch.rand(classes, 1, generator=generator)
    return centres[labels] + spread[labels] * torch.randn(len(labels), width, generator=generator), labels


def coverage(features: torch.Tensor, labels: torch.Tensor, far: float) -> None:
    manifold = Sphere(features.shape[1])
    points = as_points(features, manifold, "embeddings")
    generator = torch.Generator().manual_seed(1)
    classes = int(labels.max()) + 1
    held, wide, rates = 0, list[float](), list[float]()
    for seed in range(HALVES):
        chosen = torch.zeros(classes, dtype=torch.bool)
        chosen[torch.randperm(classes, generator=generator)[: classes // 2]] = True
        sides: list[Points] = []
        for kept in (chosen[labels], ~chosen[labels]):
            sides.append(Points(points[kept], labels[kept].unique(return_inverse=True)[1], manifold))
        found = calibrate_points(sides[0], far, seed=seed)
        rate = rates_at(Pairing.of(sides[1]), found.threshold).far
        low, high = found.interval
        held += low <= rate <= high
        wide.append(high / max(low, 1e-12))
        rates.append(rate)
    print(
        f"far {far:g}: {len(points)} images of {classes} classes, {HALVES} halves: held {held / HALVES:.1%}, realised "
        f"{min(rates):.1e} .. {max(rates):.1e}, median {median(rates):.1e}; high / low median {median(wide):.1f}",
        flush=True,
    )


if __name__ == "__main__":
    if len(sys.argv) == 3:
        features, numbers = (np.load(path) for path in sys.argv[1:])
        keys = as_keys(numbers, None, "labels", (len(features), None))[0]
        arrays = torch.from_numpy(features).float(), keys
    else:
        arrays = clusters()
    for far in (1e-2, 1e-3):
        coverage(*arrays, far)
