"""Grouplet loss: Proxy-Anchor on small random groups, weighted by the optimal transport of images to proxies."""

from collections.abc import Iterable
from typing import Any, ClassVar, Literal

import torch
from pydantic import NonNegativeInt, PositiveInt
from torch import Tensor

from dmlkit.component import Requirement, option
from dmlkit.losses.proxies.classes import Block, Classes, ClosedForm, Terms, sum_over_classes
from dmlkit.losses.proxies.transport_weights import (
    ALL_CLASSES,
    Grouplets,
    TransportWeights,
    gain,
    log_one_plus_sum_exp,
    pairs,
)
from dmlkit.losses.proxy_anchor import ProxyAnchor
from dmlkit.transport.base import TransportSolver
from dmlkit.transport.members import Exact

Scope = Literal["grouplet", "batch"]


class Grouplet(ProxyAnchor, name="grouplet"):
    r"""Grouplet (Zhang et al. 2022): Proxy-Anchor on random groups, weighted by their optimal transport plans.

    Zhang et al., CVPR 2022, eq. 1 and 2; s = relative similarity, t_i = label, x = plan of the grouplet of i.

    .. math:: \frac{1}{|P^+|} \sum_{j \in P^+} \log(1 + \sum_{t_i = j} (1 + x_{ij}) e^{-\alpha (s_{ij} - \delta)})
            + \frac{1}{C} \sum_j \log(1 + \sum_{t_i \ne j} (1 + x_{ij}) e^{\alpha (s_{ij} + \delta)})

    The plan moves each image of a grouplet to the classes in the grouplet, at cost 1 - s_ij. `TransportWeights`
    documents the problem, the grouping, resuming, and the smaller last grouplet if k does not divide the batch.
    The negative term uses the set t_i != j, as printed in the paper's f_0.

    The paper does not say over which images i a term is summed. By default these are the images of one grouplet, P+ are
    its classes, and the loss is the mean over grouplets; a smaller last grouplet has the same weight as the others. In
    the other interpretation, ``scope="batch"``, the plans are inserted into the terms of Proxy-Anchor, which are summed
    over the whole batch.

    `Exact` has no gradient through x. The paper's quadratic program with eps = 1e-4 gives the same plan and zero
    gradient unless costs are equal to within 1e-4 per unit; then the gradient has slope 1 / (2 eps). Such ties harm
    training without ``clip_grad_norm`` (map@r 0.431 instead of 0.577 on the glyphs). `NoTransport` uses plain groups,
    as a control.

    Example:
        >>> from dmlkit.manifolds import Sphere
        >>> sphere = Sphere(64)
        >>> loss = Grouplet(sphere, num_classes=10)
        >>> loss(sphere.from_features(torch.randn(8, 64)), torch.arange(8)).shape
        torch.Size([])
    """

    shares_classes: ClassVar[bool] = False
    group_size: PositiveInt = 4
    """k, number of images in a grouplet."""
    scope: Scope = "grouplet"
    """Which images share a term; the paper does not say. ``grouplet``: the images of a grouplet; ``batch``: the whole
    batch, as in ``proxy_anchor``."""
    solver: TransportSolver = Exact.Config()
    """Solver for the plans x; the paper uses quadratic."""
    seed: NonNegativeInt = 0
    """Seed of the random grouping."""
    transport: Any = option(init=False)  # `TransportWeights`

    def requirements(self) -> Iterable[Requirement]:
        return (*super().requirements(), *ALL_CLASSES)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.transport = TransportWeights(solver=self.solver, group_size=self.group_size, seed=self.seed)

    def over(self, classes: Classes) -> Tensor:
        if self.scope == "batch":
            return super().over(classes) + self.transport(classes, self.scale, self.margin)
        labels, grouping = classes.labels, self.transport.regroup(classes.labels)
        factor = 1 / sum(len(images) for images in grouping)

        def push(block: Block) -> Terms:
            return self._push_terms(block, grouping, factor / classes.total)

        def pull_and_gains(block: Block) -> Tensor:
            groups = [self.transport.solve(images, block.similarity, labels) for images in grouping]
            return factor * torch.stack([self._terms_of_present_classes(group) for group in groups]).sum()

        return sum_over_classes(pairs(classes), pull_and_gains) + sum_over_classes(classes, push)

    def _push_terms(self, block: Block, grouping: list[Tensor], factor: float) -> ClosedForm:
        """Compute the plain negative terms (w,), summed over grouplets and times a factor."""
        exponent = self.scale * (block.similarity.detach() + self.margin)
        exponent.masked_fill_(block.is_own, -torch.inf)
        terms, gradient = exponent.new_zeros(exponent.shape[1]), torch.empty_like(exponent)
        for images in grouping:
            of_group = exponent[images]  # (G, k, w)
            total = torch.logaddexp(of_group.logsumexp(1), of_group.new_zeros(()))
            terms += total.sum(0)
            gradient[images] = (of_group - total[:, None]).exp_()
        return ClosedForm(terms.mul_(factor), gradient.mul_(self.scale * factor))

    def _terms_of_present_classes(self, group: Grouplets) -> Tensor:
        """Compute the weighted positive terms of a stack of grouplets, plus the gain of the negative terms."""
        positive = -self.scale * (group.similarity - self.margin) + torch.log1p(group.plan)
        pull = log_one_plus_sum_exp(positive, group.own)  # (G, k)
        push = gain(self.scale * (group.similarity + self.margin), group.plan, ~group.own)
        mean_pull = (pull * group.has_column).sum(1) / group.has_column.sum(1)
        return mean_pull.sum() + push.sum() / self.shard.num_classes
