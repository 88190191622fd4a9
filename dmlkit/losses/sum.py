"""Several losses at once: a weighted sum, e.g. a softmax over identities plus a triplet loss."""

from collections.abc import Iterable
from typing import Annotated, Literal

import torch
from pydantic import Field, NonNegativeFloat
from torch import Tensor

from dmlkit.component import Requirement, one_of
from dmlkit.distributed.exchange import ShardedParameter
from dmlkit.losses.base import LossConfig
from dmlkit.losses.proxy_anchor import ProxyAnchor
from dmlkit.losses.several_spaces import SeveralLosses, build_with, misplaced, weighted
from dmlkit.losses.triplet import Triplet


class Sum(SeveralLosses, name="sum"):
    r"""Weighted sum of different losses on the same points, or on those before and after a neck.

    .. math:: \sum_i c_i \, \mathrm{loss}_i(x)

    Each loss has proxies and memories of its own. With one loss of weight 1 the sum equals it to the bit.

    Raises:
        ValueError: ``weights`` has another length than ``losses``.

    Example:
        >>> from dmlkit.losses import Contrastive
        >>> from dmlkit.manifolds import Euclidean
        >>> points = torch.tensor([[0.0], [3.0]])
        >>> loss = Sum(Euclidean(1), losses=(Contrastive.Config(), Contrastive.Config()), weights=(1.0, 0.5))
        >>> loss(points, torch.tensor([0, 0])).item(), loss.terms  # 3^2 + 0.5 * 3^2
        (13.5, {'contrastive': tensor(9.), 'contrastive_2': tensor(9.)})
    """

    losses: Annotated[tuple[Annotated[LossConfig, one_of], ...], Field(min_length=1)] = (
        ProxyAnchor.Config(),
        Triplet.Config(),
    )
    """The losses to add; each has the keys of its own page."""
    weights: tuple[NonNegativeFloat, ...] | None = None
    """c, the weight of each of ``losses``; null is 1 for all."""
    on: tuple[Literal["after", "before"], ...] | None = None
    """Which points each of ``losses`` takes, if the head is a ``neck``: those of the features after the neck, or before
    it; null is ``after`` for all."""

    def faults(self) -> Iterable[tuple[str, str]]:
        yield from misplaced("losses", self.losses)
        for key, values in {"weights": self.weights, "on": self.on}.items():
            if values is not None and len(values) != len(self.losses):
                yield key, f"expected one for each of {len(self.losses)} losses, got {len(values)}"

    def requirements(self) -> Iterable[Requirement]:
        if "before" in (self.on or ()):
            yield Requirement("head.has_neck", (True,), "loss.on has before, which is before the neck")

    def __post_init__(self) -> None:
        self.weights = self.weights or (1.0,) * len(self.losses)
        self.on = self.on or ("after",) * len(self.losses)
        names = [config.name for config in self.losses]
        before = [names[:index].count(name) for index, name in enumerate(names)]
        self.names = [f"{name}_{count + 1}" if count else name for name, count in zip(names, before, strict=True)]
        self.terms = dict.fromkeys(self.names, torch.zeros(()))  # of each loss in the last batch, before its weight
        self.hold(build_with(config, self.manifold, self.num_classes) for config in self.losses)
        super().__post_init__()

    @property
    def columns(self) -> int:
        """D, or 2 D if a loss takes the points before the neck, which then follow those after it."""
        return self.manifold.point_dim * (2 if "before" in (self.on or ()) else 1)

    @property
    def shares_classes(self) -> bool:
        """Whether a loss splits its classes over ranks; the others keep whole what they own."""
        return any(config.shares_classes for config in self.losses)

    @property
    def takes_several_labels(self) -> bool:
        return all(config.takes_several_labels for config in self.losses)

    @property
    def has_proxies(self) -> bool:
        """Whether exactly one loss has proxies; of several sets it would be unclear which are meant."""
        return sum(config.has_proxies for config in self.losses) == 1

    @property
    def proxies(self) -> Tensor:
        """Proxies of the one loss that has them."""
        return next(loss.proxies for config, loss in zip(self.losses, self.each, strict=True) if config.has_proxies)

    def use_members(self, members: Tensor | None) -> None:
        for loss in self.each:
            loss.use_members(members)

    def keep_shard(self, rank: int, ranks: int) -> None:
        for config, loss in zip(self.losses, self.each, strict=True):
            if config.shares_classes:
                loss.keep_shard(rank, ranks)

    def sharded_parameters(self) -> list[ShardedParameter]:
        return [
            part._replace(name=f"each.{index}.{part.name}")
            for index, loss in enumerate(self.each)
            for part in loss.sharded_parameters()
        ]

    def compute(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        assert self.weights is not None and self.on is not None
        points = dict(zip(("after", "before"), embeddings.split(self.manifold.point_dim, 1), strict=False))
        values = [loss.compute(points[on], labels) for on, loss in zip(self.on, self.each, strict=True)]
        self.terms = {name: value.detach() for name, value in zip(self.names, values, strict=True)}
        return weighted(self.weights, values)
