"""Margins and weights of a softmax over classes by the number of their training images."""

from abc import abstractmethod
from collections.abc import Iterable
from math import inf
from typing import Annotated, ClassVar

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat
from torch import Tensor

from dmlkit.component import Component, option
from dmlkit.losses.proxies.classes import Classes
from dmlkit.losses.proxies.similarity import Pool
from dmlkit.losses.proxies.softmax import RowLoss, RowLosses, SoftmaxLoss, mean_softmax_loss

FARTHEST_DRAW = 4  # standard deviations; 1 draw in 16 000 would be farther


class DynamicMargin(Component):
    """Margin a n^-b + c of a class with n training images: small classes get large ones (Ha et al. 2020).

    Ha et al. 2020 (arXiv:2010.05350), for the long tail of landmarks, with sub-center ArcFace. Margins are between 0.05
    and 0.5 by default, as in the authors' code, which scales those of the largest and the smallest class to these two.

    Example:
        >>> DynamicMargin().of(torch.tensor([1, 16, 10_000])).tolist()
        [0.5, 0.275, 0.095]
    """

    factor: NonNegativeFloat = 0.45
    """a, in units of the margin."""
    exponent: PositiveFloat = 0.25
    """b."""
    least: NonNegativeFloat = 0.05
    """c, the margin of a class of very many images."""

    def of(self, counts: Tensor) -> Tensor:
        """Return the margins (C,), in float64, of classes with ``counts`` (C,) training images."""
        return self.factor * counts.clamp(min=1).double() ** -self.exponent + self.least


class WeightedSoftmax(SoftmaxLoss):
    """A softmax over classes in which images of small classes may count more."""

    class_balance: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Exponent g of the weight n^-g of an image whose class has n training images; training images have a mean weight
    of 1. With 0 every image counts the same, with 1 every class."""
    class_weights: Tensor | None = option(init=False)  # (C,); None before the class sizes are known

    def __post_init__(self, proxies_per_class: int | None = None, pool: Pool | None = None) -> None:
        super().__post_init__(proxies_per_class, pool)
        self.register_buffer("class_weights", None, persistent=False)

    def use_counts(self, counts: Tensor) -> None:
        if self.class_balance:
            weights = counts.clamp(min=1).double() ** -self.class_balance
            weights *= counts.sum() / (weights * counts).sum()
            self.class_weights = weights.to(self.proxies)

    def over(self, classes: Classes) -> Tensor:
        row_losses, weights = self.row_losses_of(classes.all_labels), self.class_weights
        if self.class_balance and weights is None:
            raise ValueError(f"{type(self).__name__}: class_balance needs the sizes of the classes; call use_counts")
        weighted = row_losses if weights is None else _weigh(row_losses, weights[classes.all_labels])
        return mean_softmax_loss(classes, weighted, self.logits, self.logit_scale)

    def row_losses_of(self, labels: Tensor) -> RowLoss:
        """Return the loss of the rows of a batch with labels (B,)."""
        return self.row_losses


class MarginSoftmax(WeightedSoftmax):
    """A softmax over classes with a margin on the own class, which may depend on the class's size and on chance.

    Raises:
        ValueError: the margin of a class of one or of very many images, or a draw around it, is negative or reaches the
            limit.
    """

    margin: float = option()
    dynamic: DynamicMargin | None = None
    """Margin a n^-b + c of a class with n training images, in place of ``margin``; null is the same for all."""
    deviation: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Standard deviation of the margins of images around that of their class, drawn again in each training step from a
    normal distribution cut off at 4 deviations (ElasticFace: Boutros et al., CVPR workshops 2022, there 0.0125)."""
    margin_limit: ClassVar[float]
    """Margins are below it."""
    class_margins: Tensor | None = option(init=False)  # (C,); None before the class sizes are known

    def __post_init__(self, proxies_per_class: int | None = None, pool: Pool | None = None) -> None:
        super().__post_init__(proxies_per_class, pool)
        self.register_buffer("class_margins", None, persistent=False)

    def faults(self) -> Iterable[tuple[str, str]]:
        low, high = self.margin, self.margin
        if self.dynamic is not None:
            low, high = self.dynamic.least, self.dynamic.factor + self.dynamic.least
        low, high = low - FARTHEST_DRAW * self.deviation, high + FARTHEST_DRAW * self.deviation
        if low < 0 or high >= self.margin_limit:
            limit = "" if self.margin_limit == inf else f" and less than {self.margin_limit:.4g}"
            reason = f"margins from {low:.4g} to {high:.4g}, expected at least 0{limit}; choose "
            reason += "a smaller deviation, or " if self.deviation else ""
            key = "margin" if self.dynamic is None else "dynamic"
            yield key, f"{reason}another {'margin' if self.dynamic is None else 'dynamic margin'}"

    def use_counts(self, counts: Tensor) -> None:
        super().use_counts(counts)
        if self.dynamic is not None:
            self.class_margins = self.dynamic.of(counts).to(self.proxies)

    def row_losses_of(self, labels: Tensor) -> RowLoss:
        margin = self._margins(labels)
        return lambda others, own: self.with_margin(others, own, margin)

    @abstractmethod
    def with_margin(self, others: Tensor, own_logits: Tensor, margin: float | Tensor) -> RowLosses:
        """Apply the loss with margins (B,) or the same for all rows; see `SoftmaxLoss.row_losses`."""

    def _margins(self, labels: Tensor) -> float | Tensor:
        """Return the margin of each row (B,), or one for all."""
        margin: float | Tensor = self.margin
        if self.dynamic is not None:
            if self.class_margins is None:
                raise ValueError(f"{type(self).__name__}: dynamic needs the sizes of the classes; call use_counts")
            margin = self.class_margins[labels]
        if self.deviation and self.training and torch.is_grad_enabled():
            noise = torch.randn(len(labels), device=labels.device, dtype=self.proxies.dtype)
            # ranks that hold different classes may have drawn different numbers before: all take those of the first
            noise = self.shard.sum(noise if self.shard.rank == 0 else torch.zeros_like(noise))
            margin = margin + self.deviation * noise.clamp_(-FARTHEST_DRAW, FARTHEST_DRAW)
        return margin


def _weigh(row_losses: RowLoss, weights: Tensor) -> RowLoss:
    """Return the loss of the rows times their weights (B,)."""
    return lambda others, own: RowLosses(*(part * weights for part in row_losses(others, own)))
