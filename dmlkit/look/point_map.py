"""Maps from the space of a newer model to that of an older one: their fit, their choice, and what they are worth."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dmlkit.manifolds.base import Manifold
from dmlkit.manifolds.sphere import Sphere
from dmlkit.metrics.base import Labeled
from dmlkit.metrics.scoring import score_retrieval
from dmlkit.metrics.statistics import bootstrap_intervals, paired_differences
from dmlkit.run_folder.documents import CrossFigures, PairedDifference

SHRINKAGES = (1.0, 0.1, 0.01, 0.001)
LEAST_LABELS = 20  # of which a quarter, 5, are measured: as many as an interval needs


class PointMap(NamedTuple):
    """Affine map of points."""

    matrix: Tensor  # (D', D) float64
    offset: Tensor  # (D',) float64

    def __call__(self, points: Tensor, space: Manifold) -> Tensor:
        """Map points (N, D) to points (N, D') of a space, float32."""
        return space.from_features((points.double() @ self.matrix.T + self.offset).float())


def fit_map(new: Tensor, old: Tensor, *, centered: bool, shrinkage: float | None = None) -> PointMap:
    r"""Fit a map from the space of a newer model to that of an older one, given the same images in both.

    The orthogonal map is the closest of those that keep all angles and lengths (Schönemann 1966): with X and Y the
    points as rows, and the singular value decomposition of the cross-covariance,

    .. math:: R = \arg\min_{R^T R = I} \| X R^T - Y \|_F^2 = U V^T, \quad Y^T X = U S V^T

    If the widths differ, its rows or columns are orthonormal. The linear map is a ridge regression that is pulled to
    the orthogonal map instead of to zero, so that few images lead to the orthogonal one:

    .. math:: M = \arg\min_M \| X M^T - Y \|_F^2 + \lambda \| M - R \|_F^2
            = (Y^T X + \lambda R)(X^T X + \lambda I)^{-1}

    Args:
        centered: fit an offset too, as the difference of the means. On the sphere, where a point is a direction, the
            head could not compute it.
        shrinkage: lambda in units of the mean eigenvalue of X^T X; None for the orthogonal map.
    """
    x, y = new.double(), old.double()
    means = [rows.mean(0) if centered else torch.zeros_like(rows[0]) for rows in (x, y)]
    x, y = x - means[0], y - means[1]
    left, _, right = torch.linalg.svd(y.T @ x, full_matrices=False)
    matrix = left @ right
    if shrinkage is not None:
        covariance = x.T @ x
        pull = shrinkage * covariance.trace() / len(covariance)
        identity = torch.eye(len(covariance), dtype=x.dtype)
        matrix = torch.linalg.solve(covariance + pull * identity, y.T @ x + pull * matrix, left=False)
    return PointMap(matrix, means[1] - matrix @ means[0])


class Parts(NamedTuple):
    """Rows of the images that fit, choose and measure."""

    fit: Tensor
    choose: Tensor
    measure: Tensor
    held_out: Literal["labels", "images"]


def split_images(labels: Sequence[str | None]) -> Parts:
    """Divide images into a half that fits, and quarters that choose and measure: whole labels if there are 20."""
    by_label = None not in labels and len(set(labels)) >= LEAST_LABELS
    names = np.array(labels, dtype=object)
    groups = np.unique(names, return_inverse=True)[1] if by_label else np.arange(len(labels))
    count = int(groups.max()) + 1
    position = np.random.default_rng(0).permutation(count)[groups] / count
    parts = (position < 0.5, (position >= 0.5) & (position < 0.75), position >= 0.75)
    rows = (torch.from_numpy(np.flatnonzero(part)) for part in parts)
    return Parts(*rows, held_out="labels" if by_label else "images")


@dataclass(frozen=True)
class SharedImages:
    """The same images in two spaces of the same kind.

    Example:
        >>> images = SharedImages(torch.eye(8), -torch.eye(8), [None] * 8, (Sphere(8), Sphere(8)))
        >>> images.choice()[2]["map"]
        'orthogonal'
    """

    new: Tensor  # (N, D) points of the newer model
    old: Tensor  # (N, D') points of the older model
    labels: Sequence[str | None]  # N labels; None for an image without one
    spaces: tuple[Manifold, Manifold]
    """Geometry of the newer and the older points: two spheres, or two Euclidean spaces."""

    def choice(self) -> tuple[PointMap, Parts, dict[str, Any]]:
        """Return the map with the smallest mean squared distance on the images that choose, fitted to them too.

        The measured images neither fit nor choose it. Of equal maps, and below 1e-9, the orthogonal one is taken. The
        last value has the fields ``map``, ``shrinkage``, ``errors`` and ``fitted`` of `Alignment`.
        """
        parts = split_images(self.labels)
        shrinkages: dict[str, float | None] = {"orthogonal": None} | {f"linear {kept:g}": kept for kept in SHRINKAGES}
        errors: dict[str, float] = {}
        for name, shrinkage in shrinkages.items():
            mapped = self.fit(parts.fit, shrinkage)(self.new[parts.choose], self.spaces[1])
            apart = mapped.double() - self.old[parts.choose].double()
            errors[name] = float(apart.square().sum(1).mean())
        best = min(errors, key=lambda name: max(errors[name], 1e-9))
        rows, shrinkage = torch.cat([parts.fit, parts.choose]), shrinkages[best]
        chosen = {"map": best.split()[0], "shrinkage": shrinkage, "errors": errors, "fitted": len(rows)}
        return self.fit(rows, shrinkage), parts, chosen

    def fit(self, rows: Tensor, shrinkage: float | None) -> PointMap:
        """Fit a map to some of the images, see `fit_map`."""
        centered = not isinstance(self.spaces[1], Sphere)
        return fit_map(self.new[rows], self.old[rows], centered=centered, shrinkage=shrinkage)

    def figures(self, point_map: PointMap, parts: Parts) -> dict[str, Any]:
        """Measure retrieval within and between the models on the images that measure.

        Returns:
            The fields ``finds``, ``figures`` and ``gain`` of `Alignment`.
        """
        names = [self.labels[row] for row in parts.measure.tolist()]
        sizes = Counter(names)
        by_label = None not in sizes and len(sizes) > 1 and max(sizes.values()) > 1
        rows = torch.arange(len(names))
        codes = {name: code for code, name in enumerate(sizes)}
        labels = torch.tensor([codes[name] for name in names]) if by_label else rows
        old, new = self.old[parts.measure], self.new[parts.measure]
        mapped, space = point_map(new, self.spaces[1]), self.spaces[1]
        pairs = {("old", "old"): (old, old, space), ("new", "new"): (new, new, self.spaces[0])}
        if new.shape == old.shape:
            pairs["new", "old"] = (new, old, space)
        pairs |= {("new, mapped", "old"): (mapped, old, space), ("new, mapped", "new, mapped"): (mapped, mapped, space)}
        ids = rows if by_label else None
        scores = {
            models: score_retrieval(
                Labeled(points, labels, ids), Labeled(among, labels, ids), manifold, ["recall@1", "map@r"]
            )
            for models, (points, among, manifold) in pairs.items()
            if by_label or models[0] != models[1]  # each image finds itself
        }
        cross = scores["new, mapped", "old"]
        classes = labels[cross.queries] if by_label else None
        gain = paired_differences(scores["old", "old"].per_query, cross.per_query, classes) if by_label else {}
        return {
            "finds": "label" if by_label else "image",
            "figures": tuple(
                CrossFigures(
                    queries=queries,
                    gallery=gallery,
                    metrics=scored.values,
                    intervals={
                        name: interval.ends for name, interval in bootstrap_intervals(scored.per_query, classes).items()
                    },
                )
                for (queries, gallery), scored in scores.items()
            ),
            "gain": {name: PairedDifference.model_validate(change.as_dict()) for name, change in gain.items()},
        }
