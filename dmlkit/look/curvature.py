"""Delta-hyperbolicity of embeddings, and the curvature that suits them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

import torch
from torch import Tensor

from dmlkit.datasets.base import Split
from dmlkit.distributed.launch import start_ranks
from dmlkit.errors import UserError
from dmlkit.files.source import check_options, kind_of
from dmlkit.gallery.sources import open_points, split_points
from dmlkit.manifolds.base import Manifold
from dmlkit.manifolds.euclidean import Euclidean
from dmlkit.model import backbone_alone
from dmlkit.run_folder.folder import RunFolder
from dmlkit.vectors.fusion import ModelChoice
from dmlkit.vectors.points import PointSet, in_memory
from dmlkit.vectors.trained import TrainedModel, load_model

SAMPLE, DRAWS = 500, 10  # points per sample, with whose cube the time grows, and samples
DISK_DELTA = 0.144  # delta of the unit Poincaré disk (Khrulkov et al. 2020, section 3)


@dataclass(frozen=True)
class Hyperbolicity:
    """Relative delta-hyperbolicity over several random samples: 0 for a tree, at most 1."""

    deltas: list[float]  # one value per sample

    @property
    def mean(self) -> float:
        return mean(self.deltas)

    @property
    def deviation(self) -> float:
        """Standard deviation over the samples; 0 for a single one."""
        return stdev(self.deltas) if len(self.deltas) > 1 else 0.0

    @property
    def curvature(self) -> float:
        """Curvature K = -(0.144 / mean)^2 of the ball in which the data are as hyperbolic as the unit disk."""
        return -((DISK_DELTA / self.mean) ** 2)

    def curvatures_within_deviation(self) -> tuple[float, float] | None:
        """Return the curvatures at one standard deviation of delta below and above the mean.

        The result is None if there is a single sample, or if the deviation is at least the mean.
        """
        if not self.mean > self.deviation > 0:
            return None
        low, high = (Hyperbolicity([self.mean + sign * self.deviation]).curvature for sign in (-1, 1))
        return low, high


def hyperbolicity(manifold: Manifold, points: Tensor, *, sample: int, draws: int) -> Hyperbolicity:
    """Compute `relative_delta` of random samples (Khrulkov et al., CVPR 2020, arXiv:1904.02239, section 3).

    Args:
        sample: points per sample; delta grows with it, so compare only values of one sample size.
    """
    if len(points) < 4:
        raise UserError(f"curvature: delta-hyperbolicity needs at least 4 embeddings, got {len(points)}")
    generator = torch.Generator().manual_seed(0)
    deltas: list[float] = []
    for _ in range(draws):
        chosen = points[torch.randperm(len(points), generator=generator)[:sample]].double()
        deltas.append(relative_delta(manifold.distance(chosen, chosen).detach()))
    if not mean(deltas) > 0:
        raise UserError(
            "curvature: no curvature can be suggested, because delta is 0: all embeddings are equal, or their "
            "distances are those of a tree; use other images"
        )
    return Hyperbolicity(deltas)


def relative_delta(distances: Tensor) -> float:
    r"""Compute 2 delta / diameter of distances (n, n), with Gromov products at the first point (Fournier et al. 2015).

    .. math:: (x|y) = \tfrac12 (d(x, w) + d(y, w) - d(x, y)), \quad
            \delta = \max_{x, y, z} \min((x|z), (z|y)) - (x|y)
    """
    diameter = distances.max().item()
    if diameter == 0:
        return 0.0
    products = (distances[:, :1] + distances[:1] - distances) / 2
    delta = 0.0
    for row in products:  # (n, n) at once instead of (n, n, n)
        max_min = torch.minimum(row[:, None], products).amax(0)
        delta = max(delta, (max_min - row).max().item())
    return 2 * delta / diameter


def measure_curvature(
    source: Path,
    *,
    split: Split | None = None,
    device: str | None = None,
    overrides: Sequence[str] = (),
    manifold: str | None = None,
) -> tuple[Hyperbolicity, PointSet, str]:
    """Measure how tree-like embeddings, or the features of a run's images, are; see `hyperbolicity`.

    Args:
        split: for a run, the split whose images are used; by default train.

    Returns:
        The hyperbolicity, the points, and in words what they and their distances are.
    """
    if kind_of(source) == "run":
        check_options(source, "run", {"--manifold": manifold})
        split = split or "train"
        run, ranks = RunFolder(source), start_ranks(device or "auto")
        trained = load_model(run, ranks, overrides=overrides)
        features = backbone_alone(trained.model, Euclidean.Config().build(trained.model.backbone.num_features))
        recipe = trained.recipe.model_copy(update={"manifold": Euclidean.Config()})
        before = TrainedModel.of(recipe, features, trained.checkpoint, trained.epoch)
        points: PointSet = split_points(run, before, ranks, split)
        description = f"images of the {split} split, by the Euclidean distance of their features before the head"
    else:
        model = ModelChoice(device=device)
        points = open_points(source, split=split, overrides=overrides, manifold=manifold, model=model)
        description = f"embeddings of {source}, by the distance of {type(points.manifold).__name__.lower()}"
    return hyperbolicity(points.manifold, in_memory(points).points, sample=SAMPLE, draws=DRAWS), points, description
