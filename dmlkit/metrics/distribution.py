"""Metrics of the distribution of embeddings: within and between classes, over directions, and by norm."""

from typing import ClassVar, Literal

import torch
from torch import Tensor

from dmlkit.manifolds.base import Manifold
from dmlkit.manifolds.products import block_rows
from dmlkit.metrics.base import MetricConfig, Points


class SpreadConfig(MetricConfig, frozen=True):
    """Mean distance within classes and between class centers, and their ratio (Roth et al., ICML 2020, sec. 5).

    Distances are those of the manifold. A center is the mean of a class's points, projected onto the manifold.
    """

    name: Literal["spread"] = "spread"
    definition: ClassVar[str] = (
        "intra_distance: mean distance of two points of a class, over classes; inter_distance: of two class centers; "
        "density: intra / inter"
    )
    searches: ClassVar[bool] = False

    def figures(self) -> tuple[str, ...]:
        return "intra_distance", "inter_distance", "density"

    def of_points(self, points: Points) -> dict[str, float]:
        order = points.labels.argsort(stable=True)
        sizes = points.labels.bincount()
        if len(sizes) < 2:
            raise ValueError(f"labels: all {len(order)} embeddings are of one class; {self.key} needs at least two")
        within, means = list[float](), list[Tensor]()
        for rows in order.split(sizes.tolist()):
            members = points.embeddings[rows].double()  # products of float32 cancel far from the origin
            means.append(members.mean(0))
            if len(members) > 1:
                within.append(mean_distance(points.manifold, members))
        intra = sum(within) / len(within) if within else 0.0
        inter = mean_distance(points.manifold, points.manifold.geometry.projx(torch.stack(means)))
        density = intra / max(inter, 1e-12)  # finite even if all centers coincide: JSON has no infinity
        return {"intra_distance": intra, "inter_distance": inter, "density": density}


def mean_distance(manifold: Manifold, points: Tensor) -> float:
    """Compute the mean distance over all pairs of n >= 2 points (n, D)."""
    blocks = points.split(block_rows(len(points)))
    total = sum(float(manifold.distance(block, points).sum(dtype=torch.float64)) for block in blocks)
    return total / (len(points) * (len(points) - 1))


class SpectrumConfig(MetricConfig, frozen=True):
    r"""Decay of the singular values of the embeddings (Roth et al., ICML 2020, sec. 5) and their effective rank.

    With s the singular values divided by their sum, the decay is :math:`KL(U \| s)`, which is 0 if all directions are
    used equally, and the effective rank is :math:`e^{H(s)}` (Roy & Vetterli, EUSIPCO 2007).
    """

    name: Literal["spectrum"] = "spectrum"
    definition: ClassVar[str] = (
        "spectral_decay: KL(uniform || singular values), with shares of at least 1e-12; "
        "effective_rank: exp of their entropy"
    )
    searches: ClassVar[bool] = False

    def figures(self) -> tuple[str, ...]:
        return "spectral_decay", "effective_rank"

    def of_points(self, points: Points) -> dict[str, float]:
        shares = singular_shares(points.embeddings).clamp(min=1e-12)
        decay = -(shares.log() + torch.tensor(float(len(shares))).log()).mean()
        return {"spectral_decay": float(decay), "effective_rank": float(torch.exp(-(shares * shares.log()).sum()))}


def singular_shares(embeddings: Tensor) -> Tensor:
    """Compute the min(N, D) singular values of (N, D), largest first, divided by their sum, in float64."""
    triangle = embeddings.new_empty(0, embeddings.shape[1], dtype=torch.float64)
    for block in embeddings.split(2**14):  # those of the products would be wrong below 1e-8 of the largest
        triangle = torch.linalg.qr(torch.cat([triangle, block.double()]), mode="r").R
    values = torch.linalg.svdvals(triangle)
    return values / values.sum().clamp(min=torch.finfo(torch.float64).tiny)


class NormConfig(MetricConfig, frozen=True):
    """Mean length and mean squared length of the features, which may grow in training (Chen et al., AAAI 2021).

    In flat space the feature of a point is the point itself. In a hyperbolic space it is the tangent vector at the
    origin that leads to the point, whose length is the distance. On the sphere all features have length 1. With
    ``validate_every: 1`` a run's curves show how the lengths change, as in Table 1 of the paper.
    """

    name: Literal["norm"] = "norm"
    definition: ClassVar[str] = "norm: mean length of the features of embeddings; squared_norm: mean of its square"
    searches: ClassVar[bool] = False

    def figures(self) -> tuple[str, ...]:
        return "norm", "squared_norm"

    def of_points(self, points: Points) -> dict[str, float]:
        lengths = points.manifold.to_features(points.embeddings).double().norm(dim=1)
        return {"norm": lengths.mean().item(), "squared_norm": lengths.square().mean().item()}
