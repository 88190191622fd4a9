"""Loss per factor: the sum of the same loss on each factor of a product space."""

from collections.abc import Iterable
from typing import Annotated, Any

import torch
from pydantic import NonNegativeFloat
from torch import Tensor, nn

from dmlkit.component import Requirement, one_of, option
from dmlkit.losses.base import Loss, LossConfig
from dmlkit.losses.proxy_anchor import ProxyAnchor
from dmlkit.manifolds.product import Product


class PerFactor(Loss, name="per_factor"):
    r"""A loss on each factor of a product space, so that each has to separate the classes on its own.

    .. math:: \sum_i c_i \, \mathrm{loss}_i(x_i)

    x_i is the part of the point x on factor i, whose loss has proxies and memories of its own and compares by the
    default similarity of that space, e.g. the cosine on a sphere. Other losses on a product compare whole points, by
    the chords of the factors together; evaluation and search do so with either.

    Raises:
        ValueError: the manifold is not a product, or ``weights`` has another length.

    Example:
        >>> from dmlkit.losses import Contrastive
        >>> from dmlkit.manifolds import Euclidean
        >>> line = Product(2, factors=(Euclidean.Config(), Euclidean.Config()))
        >>> loss = PerFactor(line, loss=Contrastive.Config(), weights=(1.0, 10.0))
        >>> loss(torch.tensor([[0.0, 0.0], [3.0, 2.0]]), torch.tensor([0, 0])).item()  # 3^2 + 10 * 2^2
        49.0
    """

    num_classes: Any = option(default=None, kw_only=False)
    """C, for a loss that owns something per class."""
    loss: Annotated[LossConfig, one_of] = ProxyAnchor.Config()
    """The loss to compute on each factor."""
    weights: tuple[NonNegativeFloat, ...] | None = None
    """c, the weight of each factor; null is 1 for all."""

    def requirements(self) -> Iterable[Requirement]:
        yield Requirement("manifold.name", ("product",), "it computes a loss on each factor")
        yield Requirement("manifold.learnable_scales", (False,), "the scales take no part in the losses of the factors")

    def __post_init__(self) -> None:
        if not isinstance(self.manifold, Product):
            raise ValueError(f"PerFactor: expected a product of spaces, got {type(self.manifold).__name__}")
        factors, self.point_widths = self.manifold.every, self.manifold.point_widths
        self.weights = self.weights or (1.0,) * len(factors)
        if len(self.weights) != len(factors):
            raise ValueError(f"PerFactor: weights: expected one for each of {len(factors)} factors, got {self.weights}")
        classes = {} if self.num_classes is None else {"num_classes": self.num_classes}
        build: Any = self.loss.build
        self.each: tuple[Loss, ...] = tuple(build(factor, **classes) for factor in factors)
        self.losses = nn.ModuleList(self.each)
        self.num_classes = self.each[0].num_classes
        super().__post_init__()

    @property
    def has_proxies(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.loss.has_proxies

    @property
    def proxies(self) -> Tensor:
        """Proxies of the product: those of the factors' losses, concatenated; (C, d) or (C, K, d)."""
        return torch.cat([getattr(loss, "proxies") for loss in self.each], -1)  # noqa: B009

    def set_epoch(self, epoch: int) -> None:
        for loss in self.each:
            loss.set_epoch(epoch)

    def compute(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        assert self.weights is not None
        parts = zip(self.weights, self.each, embeddings.split(self.point_widths, -1), strict=True)
        values = [weight * loss.compute(part, labels) for weight, loss, part in parts]
        return sum(values[1:], start=values[0])
