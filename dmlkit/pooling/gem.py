"""Generalized-mean pooling."""

from collections.abc import Iterable
from typing import Literal

import torch
from pydantic import PositiveFloat
from torch import Tensor, nn

from dmlkit.component import Requirement
from dmlkit.pooling.base import Pooling, PoolingConfig

SMALLEST = 1e-6  # features are clamped to it: a root has infinite slope at 0


class GeMConfig(PoolingConfig, frozen=True):
    """Generalized mean: p = 1 is the average, a large p approaches the maximum, p = 3 is MPA's cubic GeM."""

    name: Literal["gem"] = "gem"
    p: PositiveFloat = 3.0
    """Exponent, one for all channels; 1 is the mean, infinity the maximum."""
    learn: bool = False
    """Train p with the backbone."""

    def requirements(self) -> Iterable[Requirement]:
        if self.learn:
            tunings = ("full", "last_blocks", "lora")
            yield Requirement("backbone.tuning.name", tunings, "p is a weight of the backbone and learn is true")

    def build(self) -> "GeM":
        return GeM(p=self.p, learn=self.learn)


class GeM(Pooling):
    r"""Radenović, Tolias & Chum, TPAMI 2019 (arXiv:1711.02512), eq. 3, with one p for all channels.

    .. math:: f = \Big(\frac{1}{HW} \sum_{x} \max(x, 10^{-6})^p\Big)^{1/p}

    Args:
        p: the exponent; its initial value if it is learned.
        learn: whether to train p.

    Example:
        >>> GeM(p=2.0)(torch.tensor([[[[1.0, 7.0]]]]))
        tensor([[5.]])
    """

    p: Tensor

    def __init__(self, *, p: float = 3.0, learn: bool = False) -> None:
        super().__init__()
        if learn:
            self.p = nn.Parameter(torch.tensor(p))
        else:
            self.register_buffer("p", torch.tensor(p), persistent=False)

    def forward(self, maps: Tensor, token: Tensor | None = None) -> Tensor:
        with torch.autocast(maps.device.type, enabled=False):  # 41^3 overflows float16
            powers = maps.float().clamp(min=SMALLEST).pow(self.p)
            return powers.mean((2, 3)).pow(1 / self.p)
