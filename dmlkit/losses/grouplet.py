"""Grouplet loss: Proxy-Anchor on small random groups, weighted by the optimal transport of images to proxies."""

from typing import Annotated, Literal

import torch
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor

from dmlkit.component import one_of
from dmlkit.losses.base import Loss, LossConfig
from dmlkit.losses.proxies.anchor_terms import Anchors, number_of_classes_in
from dmlkit.losses.proxies.class_chunks import Walk, plan_walk
from dmlkit.losses.proxies.class_sum import sum_over_classes
from dmlkit.losses.proxies.transport_weights import (
    EXACT,
    Grouplets,
    TransportWeights,
    gain,
    log_one_plus_sum_exp,
    on_pairs,
)
from dmlkit.manifolds.base import Manifold
from dmlkit.transport.base import TransportConfig, TransportSolver
from dmlkit.transport.exact import ExactConfig

Scope = Literal["grouplet", "batch"]


class GroupletConfig(LossConfig, frozen=True):
    """Grouplet (Zhang et al. 2022): Proxy-Anchor on random groups, weighted by their optimal transport plans."""

    name: Literal["grouplet"] = "grouplet"
    group_size: PositiveInt = 4  # k
    scope: Scope = "grouplet"  # which images share a term
    solver: Annotated[TransportConfig, one_of] = ExactConfig()  # of the plans x; the paper's is quadratic
    margin: NonNegativeFloat = 0.1  # delta, in similarity units (cosine on the sphere)
    scale: PositiveFloat = 32.0  # alpha, inverse temperature
    seed: NonNegativeInt = 0  # of the grouping
    chunk_size: PositiveInt | None = None  # classes computed at a time; None chooses by size

    def build(self, manifold: Manifold, num_classes: int) -> "Grouplet":
        options = self.model_dump(exclude={"name", "solver"})
        return Grouplet(manifold, num_classes, solver=self.solver.build(), **options)


class Grouplet(Loss):
    r"""Zhang et al., CVPR 2022, eq. 1 and 2; s = manifold similarity, t_i = label, x = plan of the grouplet of i.

    .. math:: \frac{1}{|P^+|} \sum_{j \in P^+} \log(1 + \sum_{t_i = j} (1 + x_{ij}) e^{-\alpha (s_{ij} - \delta)})
            + \frac{1}{C} \sum_j \log(1 + \sum_{t_i \ne j} (1 + x_{ij}) e^{\alpha (s_{ij} + \delta)})

    The plan moves each image of a grouplet to the classes that the grouplet contains, at cost 1 - s_ij; see
    `TransportWeights` for its problem, the grouping, resuming, and the smaller last grouplet where k does not divide
    the batch. D: the set printed in the paper's f_0 for the negative term is t_i != j.

    The paper does not say over which i a term runs. D: with ``scope="grouplet"`` over the images of one grouplet, P+
    its classes, and the loss is the mean over grouplets, the smaller one counting as much as the others;
    ``scope="batch"`` keeps Proxy-Anchor's terms over the whole batch and inserts the plans, which
    ``ProxyAnchor(transport=...)`` is, too.

    Args:
        manifold: the geometry of embeddings and proxies.
        num_classes: C, one proxy each.
        group_size: k >= 1.
        scope: ``"grouplet"`` or ``"batch"``.
        solver: of the plans. `Exact` has no gradient through x. The paper's quadratic programme with eps = 1e-4
            gives the same plan and zero gradient unless costs tie within 1e-4 per unit.
        margin: delta >= 0, in similarity units.
        scale: alpha > 0, inverse temperature.
        seed: of the grouping.
        chunk_size: how many classes to compute at a time; None chooses by size. The value does not depend on it.

    Raises:
        ValueError: an unknown scope or a group size below 1; see `Loss.forward`.

    Example:
        >>> from dmlkit.manifolds import Sphere
        >>> sphere = Sphere(64)
        >>> loss = Grouplet(sphere, num_classes=10)
        >>> loss(sphere.from_features(torch.randn(8, 64)), torch.arange(8)).shape
        torch.Size([])
    """

    def __init__(
        self,
        manifold: Manifold,
        num_classes: int,
        *,
        group_size: int = 4,
        scope: Scope = "grouplet",
        solver: TransportSolver = EXACT,
        margin: float = 0.1,
        scale: float = 32.0,
        seed: int = 0,
        chunk_size: int | None = None,
    ) -> None:
        super().__init__(manifold, num_classes)
        if scope not in ("grouplet", "batch"):
            raise ValueError(f"Grouplet: expected scope grouplet or batch, got {scope!r}")
        self.scope: Scope = scope
        self.margin, self.scale, self.chunk_size = margin, scale, chunk_size
        self.transport = TransportWeights(solver, group_size=group_size, seed=seed)
        self.proxies = manifold.new_proxies(num_classes)  # (C, d)

    def compute(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        walk = plan_walk(self.manifold, embeddings, self.proxies, self.chunk_size)
        if self.scope == "grouplet":
            return self._mean_over_grouplets(walk, embeddings, labels)
        present = number_of_classes_in(labels, len(self.proxies), like=embeddings)
        anchors = Anchors(labels, self.scale, self.margin, 1 / present, present.new_full((), 1 / len(self.proxies)))
        plain = sum_over_classes(walk, anchors.score, embeddings, self.proxies)
        return plain + self.transport(walk, embeddings, self.proxies, anchors)

    def _mean_over_grouplets(self, walk: Walk, embeddings: Tensor, labels: Tensor) -> Tensor:
        grouping = self.transport.regroup(labels)
        factor = 1 / sum(len(images) for images in grouping)
        per_class = factor / len(self.proxies)

        def plain_push(similarity: Tensor, first: int) -> tuple[Tensor, Tensor]:
            exponent = self.scale * (similarity + self.margin)
            classes = torch.arange(first, first + exponent.shape[1], device=labels.device)
            exponent.masked_fill_(labels[:, None] == classes, -torch.inf)
            value, gradient = exponent.new_zeros(()), torch.empty_like(exponent)
            for images in grouping:
                of_group = exponent[images]  # (G, k, w)
                total = log_one_plus_sum_exp(of_group)
                value += total.sum()
                gradient[images] = (of_group - total).exp()
            return value * per_class, gradient * (self.scale * per_class)

        def weighted(similarity: Tensor) -> Tensor:
            groups = [self.transport.solve(images, similarity, labels) for images in grouping]
            return factor * torch.stack([self._terms_of_present_classes(group) for group in groups]).sum()

        terms = on_pairs(walk, weighted, embeddings, self.proxies, labels)
        return terms + sum_over_classes(walk, plain_push, embeddings, self.proxies)

    def _terms_of_present_classes(self, group: Grouplets) -> Tensor:
        """The weighted positive terms of a stack of grouplets, and the gain of the weights on the negative ones."""
        positive = -self.scale * (group.similarity - self.margin) + torch.log1p(group.plan)
        pull = log_one_plus_sum_exp(positive.masked_fill(~group.own, -torch.inf))[:, 0]  # (G, k)
        push = gain(self.scale * (group.similarity + self.margin), group.plan, ~group.own)
        mean_pull = (pull * group.has_column).sum(1) / group.has_column.sum(1)
        return mean_pull.sum() + push.sum() / len(self.proxies)
