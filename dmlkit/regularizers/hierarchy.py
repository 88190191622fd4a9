"""Hierarchy (HIER): learned proxies become the inner nodes of a tree over the images, without labels of a hierarchy."""

from collections.abc import Mapping
from typing import Annotated, NamedTuple

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor
from torch.nn import Parameter
from torch.nn.functional import gumbel_softmax, relu

from dmlkit.component import option
from dmlkit.regularizers.base import Regularizer, mean_where, stack_levels


class Hierarchy(Regularizer, name="hierarchy"):
    r"""HIER (Kim et al. 2023): related images should share a closer learned ancestor than unrelated ones.

    The hierarchical regularization of Kim et al., CVPR 2023 (arXiv:2212.14258), with any distance d.

    For a triplet of related points i, j and a point k that is not related to i, with [x]_+ = max(x, 0):

    .. math:: [d_{i,a} - d_{i,b} + \delta]_+ + [d_{j,a} - d_{j,b} + \delta]_+ + [d_{k,b} - d_{k,a} + \delta]_+

    a is the ancestor of i and j, b that of all three: one of the hierarchical proxies p, drawn with a Gumbel-softmax,

    .. math:: P(a = p) \propto e^{-\max(d_{i,p}, d_{j,p}) / \tau}, \quad
            P(b = p) \propto e^{-\max(d_{i,p}, d_{j,p}, d_{k,p}) / \tau}

    whose gradient is that of the softmax (straight-through). A triplet with a = b counts as 0. The value is the mean
    over triplets of images plus the mean over triplets of proxies, which learns levels above the first. Related are
    points that are among the K nearest of each other; images of the same class are nearer than all others. Without a
    related or an unrelated point there are no triplets, and the mean is 0.

    D: proxies start where `Manifold.new_proxies` puts them, not near the border of the ball. D: K is at most half of
    the number of points, so that a small batch has unrelated points. D: k is never i itself, as it can be in the
    authors' code. On a sphere d is the manifold's distance, in the authors' code its square.

    With ``levels`` the known hierarchy orders the images before the distance does: those that share more levels with an
    image are nearer than all that share fewer. Related images are then those of the same class, genus, and so on, until
    K are found, and the learned ancestors get to know the levels above the classes.

    The proxies are trained with the learning rate of the loss.

    Example:
        >>> from dmlkit.manifolds import Poincare
        >>> ball = Poincare(8)
        >>> term = Hierarchy(ball, num_proxies=16)
        >>> term(ball.from_features(torch.randn(6, 8)), torch.tensor([0, 0, 1, 1, 2, 2])).shape
        torch.Size([])
    """

    num_proxies: Annotated[int, Field(ge=4)] = 512
    """Number of hierarchical proxies, the possible ancestors."""
    neighbors: Annotated[int, Field(ge=2)] = 30
    """K; two points are related if each is among the K nearest of the other, itself included; at most half of all."""
    triplets_per_anchor: PositiveInt = 10
    """Triplets drawn for each image and each proxy; time and memory grow with triplets_per_anchor x num_proxies^2."""
    margin: NonNegativeFloat = 0.1
    """delta, in units of the distance."""
    needs_levels: bool = option(default=False, alias="levels")
    """Use the levels of the dataset (``dataset.levels``): images that share more levels are nearer than all others."""
    temperature: PositiveFloat = 0.1
    """tau of the choice of an ancestor, in units of the distance; lower makes the nearest one more likely."""
    levels: Tensor | None = option(default=None, init=False)  # (C, L)
    proxies: Parameter = option(init=False)  # (P, d)

    def __post_init__(self) -> None:
        self.proxies = self.manifold.new_proxies(self.num_proxies)

    def use_levels(self, levels: Mapping[str, Tensor]) -> None:
        self.levels = stack_levels("hierarchy", levels) if self.needs_levels else None

    def compute(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        proxies = self.manifold.proxy_points(self.proxies)
        between = self.manifold.distance(proxies, proxies)  # (P, P)
        points = embeddings.detach()
        apart = self.manifold.distance(points, points)  # (B, B)
        classes = labels[:, None] if self.levels is None else self.levels.to(labels.device)[labels]  # (B, L)
        shared = (classes[:, None] == classes).sum(2)
        of_images = self._mean_over_triplets(
            apart - (1 + apart.max()) * shared, self.manifold.distance(embeddings, proxies)
        )
        return of_images + self._mean_over_triplets(between.detach(), between)

    def _mean_over_triplets(self, rank: Tensor, distance: Tensor) -> Tensor:
        triplets = draw_triplets(rank, self.neighbors, self.triplets_per_anchor)
        values = triplet_values(distance, triplets, self.margin, self.temperature)
        return mean_where(values, triplets.exist)


class DrawnTriplets(NamedTuple):
    """T triplets for each of N anchors."""

    related: Tensor  # (N, T) int64
    unrelated: Tensor  # (N, T) int64
    exist: Tensor  # (N, 1) bool, whether the anchor has a related and an unrelated point


def draw_triplets(rank: Tensor, neighbors: int, count: int) -> DrawnTriplets:
    """Draw pairs of a related and an unrelated point for each anchor, uniformly and with replacement.

    Args:
        rank: (N, N), orders the neighbors of each row; smaller is nearer, the row itself included.
        neighbors: K; related points are among the K nearest of each other, or the N // 2 nearest if these are fewer.
        count: T, number of pairs per anchor.
    """
    size = len(rank)
    nearest = rank.topk(min(neighbors, size // 2), largest=False, sorted=False).indices
    is_neighbor = torch.zeros_like(rank, dtype=torch.bool).scatter_(1, nearest, True)
    related = (is_neighbor & is_neighbor.T).fill_diagonal_(False)
    order = (~related).long().fill_diagonal_(2).argsort(dim=1, stable=True)  # related, unrelated, itself
    counts = related.sum(1, keepdim=True)  # (N, 1)
    others = size - 1 - counts
    draws = torch.rand(2, size, count, device=rank.device)
    first, second = (
        (draw * available).long().minimum(available - 1).clamp_(min=0)
        for draw, available in zip(draws, (counts, others), strict=True)
    )
    return DrawnTriplets(order.gather(1, first), order.gather(1, counts + second), (counts > 0) & (others > 0))


def triplet_values(distance: Tensor, triplets: DrawnTriplets, margin: float, temperature: float) -> Tensor:
    """Draw the ancestors of triplets and compute the terms of the class docstring, before the mean: (N, T).

    Args:
        distance: (N, P), from each of N points to each of P proxies.
    """
    of_i, of_j, of_k = distance[:, None], distance[triplets.related], distance[triplets.unrelated]  # (N, T or 1, P)
    farther = torch.maximum(of_i, of_j)
    lower = gumbel_softmax(-farther / temperature, hard=True)  # one-hot, (N, T, P)
    upper = gumbel_softmax(-torch.maximum(farther, of_k) / temperature, hard=True)
    step = lower - upper
    i, j, k = ((distances * step).sum(-1) for distances in (of_i, of_j, of_k))
    values = relu(i + margin) + relu(j + margin) + relu(margin - k)
    return torch.where(lower.argmax(-1) == upper.argmax(-1), 0, values)
