"""Miners: select the triplets of a batch that a loss uses."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from dmlkit.component import Component, ComponentConfig, Requirement, import_on_demand, option
from dmlkit.manifolds.base import Manifold
from dmlkit.manifolds.sphere import Sphere

__all__ = ["All", "DistanceWeighted", "Hard", "Miner", "MinerConfig", "SemiHard", "Triplets"]


class MinerConfig(ComponentConfig, frozen=True):
    """Root of the miner family."""

    @abstractmethod
    def build(self, manifold: Manifold) -> "Miner":
        """Return the miner for embeddings on ``manifold``."""


@dataclass(frozen=True)
class Triplets:
    """Selected triplets (anchor, positive, negative) of B rows and M columns, without a list of their indices.

    The length of such a list is known only to the device, and waiting for it stalls a GPU.

    Args:
        keep: (B, M) bool; whether the cell (a, p) is an anchor with a positive to use.
        negative: (B, M) int64; the column of the negative for the cell; any value if ``keep`` is False.
            None: every negative of the anchor is used with each of its kept positives.
    """

    keep: Tensor
    negative: Tensor | None


class Miner(Component, ABC, family=MinerConfig):
    """Selects triplets by their distances. The selection has no gradient."""

    @abstractmethod
    def __call__(self, distance: Tensor, positive: Tensor, negative: Tensor) -> Triplets:
        """Return the selected triplets.

        Args:
            distance: (B, M), the manifold's distance of each anchor (row) to each candidate (column).
            positive: (B, M) bool, whether the column has the label of the row and is not the row itself.
            negative: (B, M) bool, whether the column has another label.
        """


class All(Miner, name="all"):
    """Every triplet: each positive with each negative of its anchor.

    Example:
        >>> import torch
        >>> same = torch.tensor([[False, True, False]])
        >>> All()(torch.rand(1, 3), same, ~same).negative is None
        True
    """

    def __call__(self, distance: Tensor, positive: Tensor, negative: Tensor) -> Triplets:
        return Triplets(positive, None)


class Hard(Miner, name="hard"):
    r"""Batch-hard (Hermans et al. 2017): the farthest positive and the nearest negative of each anchor.

    Hermans et al., arXiv:1703.07737, eq. 5: one triplet for each anchor with a positive and a negative.

    .. math:: p(a) = \arg\max_p d(a, p), \quad n(a) = \arg\min_n d(a, n)

    Example:
        >>> distance = torch.tensor([[0.0, 0.5, 0.8, 0.7, 0.9]])
        >>> positive = torch.tensor([[False, True, True, False, False]])
        >>> negative = torch.tensor([[False, False, False, True, True]])
        >>> triplets = Hard()(distance, positive, negative)
        >>> triplets.keep.nonzero().tolist(), triplets.negative[0, 2].item()
        ([[0, 2]], 3)
    """

    @torch.no_grad()
    def __call__(self, distance: Tensor, positive: Tensor, negative: Tensor) -> Triplets:
        farthest = distance.masked_fill(~positive, -torch.inf).argmax(1)  # (B,)
        nearest = distance.masked_fill(~negative, torch.inf).argmin(1)  # (B,)
        is_farthest = torch.zeros_like(positive).scatter_(1, farthest[:, None], True)
        keep = is_farthest & positive & negative.any(1, keepdim=True)
        return Triplets(keep, nearest[:, None].expand_as(distance))


class SemiHard(Miner, name="semi_hard"):
    r"""Semi-hard (Schroff et al. 2015): for each positive, the nearest negative that is farther than the positive.

    Schroff et al., CVPR 2015 (arXiv:1503.03832), section 3.2: all positives, each with a semi-hard negative.

    .. math:: n(a, p) = \arg\min_n \{ d(a, n) : d(a, n) > d(a, p) \}

    The paper does not say which semi-hard negative to use; this takes the hardest one. A positive that is farther
    than every negative is skipped.

    Example:
        >>> distance = torch.tensor([[0.0, 0.5, 0.4, 0.7, 0.9]])
        >>> positive = torch.tensor([[False, True, False, False, False]])
        >>> negative = torch.tensor([[False, False, True, True, True]])
        >>> SemiHard()(distance, positive, negative).negative[0, 1].item()
        3
    """

    @torch.no_grad()
    def __call__(self, distance: Tensor, positive: Tensor, negative: Tensor) -> Triplets:
        ordered, columns = distance.masked_fill(~negative, torch.inf).sort(dim=1)  # (B, M), nearest negative first
        first_beyond = torch.searchsorted(ordered, distance, right=True)  # (B, M), M if nothing is farther
        exists = first_beyond < negative.sum(1, keepdim=True)
        return Triplets(positive & exists, columns.gather(1, first_beyond.clamp(max=distance.shape[1] - 1)))


REASON = "it weights a negative by the density of chords between random points of the unit sphere"

Chord = Annotated[float, Field(gt=0, lt=2)]


class DistanceWeighted(Miner, name="distance_weighted"):
    r"""Distance-weighted (Wu et al. 2017): a random negative for each positive, with uniformly distributed distances.

    Wu et al., ICCV 2017 (arXiv:1706.07567), eq. 4: one negative for each positive, drawn by its chord d.

    .. math:: P(n \mid a) \propto q(d(a,n))^{-1}, \quad q(d) = d^{D-2} (1 - d^2/4)^{(D-3)/2}

    q is the density of d between random points of the unit sphere in D dimensions. d is clipped at ``cutoff``,
    which bounds the weights as the paper's lambda does. An anchor whose negatives are all beyond ``max_distance`` draws
    uniformly among them, so that its positives are used. Draws come from the global generator.

    Raises:
        ValueError: the manifold is not a sphere, ``max_distance`` is 2 or more, where q is zero, or ``cutoff`` is not
            below it.

    Example:
        >>> miner = DistanceWeighted(Sphere(3))
        >>> distance = torch.tensor([[0.0, 0.3, 0.9, 1.9]])
        >>> positive = torch.tensor([[False, True, False, False]])
        >>> miner(distance, positive, torch.tensor([[False, False, True, True]])).negative[0, 1].item()
        2
    """

    manifold: Manifold = option(kw_only=False)
    """A sphere; with the metric ``arc``, arcs are converted to chords."""
    cutoff: Chord = 0.5
    """Negatives nearer than this are weighted as if they had this distance, like the clipping in the paper."""
    max_distance: Chord = 1.4
    """Negatives farther than this are drawn only if there are no others; they have no loss if beta + alpha is 1.4."""

    def requirements(self) -> Iterable[Requirement]:
        return (Requirement("manifold.name", ("sphere",), REASON),)

    def faults(self) -> Iterable[tuple[str, str]]:
        if self.cutoff > self.max_distance:
            yield "cutoff", f"got {self.cutoff:g}, expected at most max_distance, {self.max_distance:g}"

    def __post_init__(self) -> None:
        if not isinstance(self.manifold, Sphere):
            raise ValueError(f"DistanceWeighted: expected Sphere, because {REASON}; got {type(self.manifold).__name__}")
        self.dim, self.is_arc = self.manifold.dim, self.manifold.metric == "arc"

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


import_on_demand(__name__)
