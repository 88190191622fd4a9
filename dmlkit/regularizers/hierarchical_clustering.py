"""Hierarchical clustering (HypHC): similar proxies get a common ancestor far from the origin of hyperbolic space."""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Annotated

import torch
from pydantic import Field, PositiveFloat
from torch import Tensor

from dmlkit.component import Requirement, option, recipe_key
from dmlkit.manifolds.base import Manifold
from dmlkit.manifolds.hyperbolic import Hyperbolic
from dmlkit.manifolds.product import Product
from dmlkit.manifolds.products import safe_sqrt, unit_vectors
from dmlkit.regularizers.base import Regularizer, stack_levels


class HierarchicalClustering(Regularizer, name="hierarchical_clustering"):
    r"""HypHC (Chami et al. 2020) of the loss's proxies: similar ones share an ancestor far from the root of a tree.

    Chami et al., NeurIPS 2020: Dasgupta's cost of the tree that points span in hyperbolic space, made continuous.

    For each triplet i, j, k of points with similarities w (HypHC, arXiv:2010.00402, section 4.2):

    .. math:: w_{ij} + w_{ik} + w_{jk} - \sum_{p \in \{ij, ik, jk\}} w_p \, \mathrm{softmax}_p(d_o(p) / \tau)

    The lowest common ancestor of two points is the point nearest to the origin on the geodesic between them, and d_o
    its distance from the origin. The pair with the deepest ancestor merges first; its similarity should be the largest.
    The value is the mean over all triplets of the points, 0 if there are fewer than three. The part of Dasgupta's cost
    that does not depend on the tree is left out.

    In training the points are proxies of the loss, as in CHEST (Saeki et al., arXiv:2510.05643), and drawn again for
    each step. Only the abstract of CHEST was available, so what follows is our choice. D: w has no gradient. It
    is the mean relative similarity in the other factors of a product space, so that a sphere gives a ball its tree; in
    a single space it is that of the space itself, so that similarities the loss has found become a tree. With
    ``levels`` it is the share of the levels of the known hierarchy that two classes share. D: points keep their
    distance from the origin, which the authors' code makes equal. The terms of several hyperbolic factors are added.

    Raises:
        ValueError: the manifold is not hyperbolic.

    Example:
        >>> from dmlkit.manifolds import Poincare
        >>> ball = Poincare(8)
        >>> term = HierarchicalClustering(ball)
        >>> term(ball.from_features(torch.randn(6, 8)), torch.arange(6)).shape
        torch.Size([])
    """

    weight: PositiveFloat = recipe_key(default=10.0)
    """lambda, weight of the term relative to the loss; the gradient of a mean over triplets is small."""
    proxies_per_step: Annotated[int, Field(ge=3, le=256)] = 64
    """Maximum number of the loss's proxies that are drawn for a step, n; time and memory grow with n^3."""
    temperature: PositiveFloat = 0.1
    """tau of the choice of the pair that merges first, in units of the distance."""
    needs_levels: bool = option(default=False, alias="levels")
    """Use the levels of the dataset (``dataset.levels``) as similarity: the share of levels that two classes share."""
    levels: Tensor | None = option(default=None, init=False)  # (C, L)

    def requirements(self) -> Iterable[Requirement]:
        reason = "the ancestors of a tree lie in hyperbolic space; a product needs a hyperbolic factor"
        yield Requirement("manifold.is_hyperbolic", (True,), reason)
        yield Requirement("loss.has_proxies", (True,), "the proxies of the loss are clustered")
        yield Requirement("training.shard_proxies", (False,), "it compares proxies of all classes")

    def __post_init__(self) -> None:
        if not self.manifold.is_hyperbolic:
            name = type(self.manifold).__name__
            raise ValueError(f"HierarchicalClustering: expected a manifold with a hyperbolic factor, got {name}")

    def use_levels(self, levels: Mapping[str, Tensor]) -> None:
        self.levels = stack_levels("hierarchical_clustering", levels) if self.needs_levels else None

    def compute(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        factors = [(self.manifold, embeddings)]
        if isinstance(self.manifold, Product):
            factors = list(zip(self.manifold.every, embeddings.split(self.manifold.point_widths, -1), strict=True))
        costs: list[Tensor] = []
        for index, (space, points) in enumerate(factors):
            if isinstance(space, Hyperbolic):
                others = [factor for other, factor in enumerate(factors) if other != index] or factors
                similarity = self._similarity(others, labels)
                costs.append(triplet_costs(ancestor_depths(space, points), similarity, self.temperature))
        total = sum(costs[1:], start=costs[0])
        return total.sum() / max(len(total), 1)

    @torch.no_grad()
    def _similarity(self, spaces: list[tuple[Manifold, Tensor]], labels: Tensor) -> Tensor:
        """Compute the similarities w (N, N) from the levels, or from the points in some spaces."""
        if self.levels is not None:
            classes = self.levels.to(labels.device)[labels]  # (N, L)
            return (classes[:, None] == classes).float().mean(2)
        return torch.stack([space.relative_similarity(points, points) for space, points in spaces]).mean(0)


def ancestor_depths(space: Hyperbolic, points: Tensor) -> Tensor:
    r"""Compute the distances (N, N) from the origin to the geodesics between each two of the points (N, D).

    Points at distances a and b from the origin, in units of :math:`1 / \sqrt{-K}`, seen from there at an angle t, have
    the area formula of hyperbolic trigonometry for the height p of their triangle:

    .. math:: \sinh p = \frac{\sinh a \, \sinh b \, \sin t}{\sinh d}, \quad
            \sinh^2 \tfrac d2 = \sinh^2 \tfrac{a - b}2 + \sinh a \, \sinh b \, \sin^2 \tfrac t2

    If the height does not meet the geodesic between the points, the nearer point is its end nearest to the origin.
    Here sinh^2 p is divided out such that points close to each other have a finite gradient:

    .. math:: \sinh^2 p = \frac{\sinh a \, \sinh b \, \cos^2 \tfrac t2}{(1 + \sinh^2 \tfrac d2)(1 + u)}, \quad
            u = \frac{\sinh^2 \frac{a - b}2}{\sinh a \, \sinh b \, \sin^2 \tfrac t2}

    Example:
        >>> from dmlkit.manifolds import Poincare
        >>> ball = Poincare(2)
        >>> points = ball.from_features(torch.tensor([[1.0, 0.0], [2.0, 0.0], [-1.0, 0.0]]))
        >>> ancestor_depths(ball, points).round(decimals=4)  # on a line through the origin
        tensor([[1., 1., 0.],
                [1., 2., 0.],
                [0., 0., 1.]])
    """
    features = space.to_features(points)
    root = (-space.curvature).sqrt()
    length = torch.linalg.vector_norm(features, dim=-1) * root
    direction = unit_vectors(features, 1e-12)
    a, b = length[:, None], length
    area = a.sinh() * b.sinh()
    sine, cosine = ((direction[:, None] + sign * direction).square().sum(-1) / 4 for sign in (-1, 1))  # squares, of t/2
    # tanh a > tanh b cos t, times the hyperbolic cosines of both: the angle at the first point is acute
    acute = (a - b).sinh() + 2 * b.sinh() * a.cosh() * sine > 0
    between = acute & acute.T & (area * sine > torch.finfo(area.dtype).tiny)
    gap = ((a - b) / 2).sinh().square()
    share = gap / torch.where(between, area * sine, 1)
    height = safe_sqrt(torch.where(between, area * cosine / ((1 + gap + area * sine) * (1 + share)), 0)).asinh()
    return torch.where(between, height, torch.minimum(a, b)) / root


def triplet_costs(depth: Tensor, similarity: Tensor, temperature: float) -> Tensor:
    """Compute the terms of the class docstring of all T = N (N - 1) (N - 2) / 6 triplets of N points: (T,).

    Args:
        depth: d_o of each two points, (N, N).
        similarity: w, (N, N).
    """
    pairs = triplet_pairs(len(depth)).to(depth.device)
    depth, weights = (matrix.flatten().gather(0, pairs.flatten()).view(3, -1) for matrix in (depth, similarity))
    return (weights * (1 - (depth / temperature).softmax(0))).sum(0)


@lru_cache(maxsize=4)
def triplet_pairs(count: int) -> Tensor:
    """Return the places of the pairs ij, ik and jk in a flat matrix (N, N), for all triplets i < j < k: (3, T).

    They are computed on the CPU, since their number depends on values, for which a GPU would have to wait.
    """
    with torch.inference_mode(False):  # a step with gradient may use them later
        i, j, k = torch.combinations(torch.arange(count), 3).T
        return torch.stack([i * count + j, i * count + k, j * count + k])
