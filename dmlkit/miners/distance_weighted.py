"""Distance-weighted sampling: negatives at all distances, not only at the most frequent ones."""

from collections.abc import Iterable
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from dmlkit.component import Requirement
from dmlkit.manifolds.base import Manifold
from dmlkit.manifolds.sphere import Sphere
from dmlkit.miners.base import Miner, MinerConfig, Triplets

REASON = "it weights a negative by the density of chords between random points of the unit sphere"

Chord = Annotated[float, Field(gt=0, lt=2)]


class DistanceWeightedConfig(MinerConfig, frozen=True):
    """Distance-weighted (Wu et al. 2017): a random negative for each positive, uniform over the distances."""

    name: Literal["distance_weighted"] = "distance_weighted"
    cutoff: Chord = 0.5
    """Nearer negatives are weighted as if at this distance: the paper's clipping."""
    max_distance: Chord = 1.4
    """Farther negatives are drawn only if there are no others: they have no loss if beta + alpha is 1.4."""

    def build(self, manifold: Manifold) -> "DistanceWeighted":
        return DistanceWeighted(manifold, cutoff=self.cutoff, max_distance=self.max_distance)

    def requirements(self) -> Iterable[Requirement]:
        return (Requirement("manifold.name", ("sphere",), REASON),)


class DistanceWeighted(Miner):
    r"""Wu et al., ICCV 2017 (arXiv:1706.07567), eq. 4: one negative for each positive, drawn by its chord d.

    .. math:: P(n \mid a) \propto q(d(a,n))^{-1}, \quad q(d) = d^{D-2} (1 - d^2/4)^{(D-3)/2}

    q is the density of d between random points of the unit sphere in D dimensions. d is clipped at ``cutoff``,
    which bounds the weights as the paper's lambda does. An anchor whose negatives are all beyond ``max_distance`` draws
    uniformly among them, so that its positives are used. Draws come from the global generator.

    Args:
        manifold: a `Sphere`; with the metric ``arc``, arcs are converted to chords.
        cutoff: > 0, a chord; nearer negatives are weighted as if at this one.
        max_distance: in (0, 2), a chord; farther negatives are not drawn, except as described above.

    Raises:
        ValueError: the manifold is not a sphere, or ``max_distance`` is 2 or more, where q is zero.

    Example:
        >>> miner = DistanceWeighted(Sphere(3))
        >>> distance = torch.tensor([[0.0, 0.3, 0.9, 1.9]])
        >>> positive = torch.tensor([[False, True, False, False]])
        >>> miner(distance, positive, torch.tensor([[False, False, True, True]])).negative[0, 1].item()
        2
    """

    def __init__(self, manifold: Manifold, *, cutoff: float = 0.5, max_distance: float = 1.4) -> None:
        if not isinstance(manifold, Sphere):
            raise ValueError(f"DistanceWeighted: expected Sphere, because {REASON}; got {type(manifold).__name__}")
        if max_distance >= 2:
            raise ValueError(f"DistanceWeighted: expected max_distance below 2, got {max_distance:g}")
        self.dim, self.is_arc = manifold.dim, manifold.metric == "arc"
        self.cutoff, self.max_distance = cutoff, max_distance

    @torch.no_grad()
    def __call__(self, distance: Tensor, positive: Tensor, negative: Tensor) -> Triplets:
        chord = 2 * (distance / 2).sin() if self.is_arc else distance
        weights = self._weights(chord, negative)  # (B, M)
        # A row without negatives has no distribution to draw from; its draws are not kept.
        weights = torch.where(negative.any(1, keepdim=True), weights, 1)
        drawn = torch.multinomial(weights, distance.shape[1], replacement=True)  # (B, M)
        return Triplets(positive & negative.any(1, keepdim=True), drawn)

    def _weights(self, chord: Tensor, negative: Tensor) -> Tensor:
        is_near = negative & (chord < self.max_distance)
        candidates = torch.where(is_near.any(1, keepdim=True), is_near, negative)
        d = chord.clamp(self.cutoff, self.max_distance)
        log_weights = (2 - self.dim) * d.log() + (3 - self.dim) / 2 * (1 - d.square() / 4).log()
        log_weights = log_weights.masked_fill(~candidates, -torch.inf)
        # Beyond max_distance d is clipped, so the fallback weights are equal. softmax subtracts the row's maximum:
        # at D = 512 the weights span 1e150.
        return log_weights.softmax(1).nan_to_num()
