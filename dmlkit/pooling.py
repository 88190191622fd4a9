"""Pooling: feature maps or tokens to one feature vector per image."""

from abc import ABC, abstractmethod
from collections.abc import Iterable

import torch
from pydantic import PositiveFloat
from torch import Tensor, nn

from dmlkit.component import Component, ComponentConfig, Requirement, import_on_demand, option

__all__ = ["Avg", "AvgMax", "Cls", "GeM", "Max", "Pooling", "PoolingConfig"]


class PoolingConfig(ComponentConfig, frozen=True):
    """Root of the pooling family."""

    @abstractmethod
    def build(self) -> "Pooling":
        """Return the pooling layer."""


class Pooling(Component, nn.Module, ABC, family=PoolingConfig):
    """A layer from feature maps (B, C, H, W) to vectors (B, C)."""

    @abstractmethod
    def forward(self, maps: Tensor, token: Tensor | None = None) -> Tensor:
        """Pool maps (B, C, H, W) to vectors (B, C); a transformer also passes its class token (B, C)."""


class Avg(Pooling, name="avg"):
    """The mean over all positions.

    Example:
        >>> import torch
        >>> Avg()(torch.tensor([[[[1.0, 2.0], [3.0, 6.0]]]]))
        tensor([[3.]])
    """

    def forward(self, maps: Tensor, token: Tensor | None = None) -> Tensor:
        return maps.mean((2, 3))


class Max(Pooling, name="max"):
    """The maximum over all positions.

    Example:
        >>> import torch
        >>> Max()(torch.tensor([[[[1.0, 2.0], [3.0, 6.0]]]]))
        tensor([[6.]])
    """

    def forward(self, maps: Tensor, token: Tensor | None = None) -> Tensor:
        return maps.amax((2, 3))


class AvgMax(Pooling, name="avg_max"):
    """Mean plus maximum, used for the published Proxy-Anchor results; adds about 1 % to R@1 on CUB and Cars.

    Example:
        >>> import torch
        >>> AvgMax()(torch.tensor([[[[1.0, 2.0], [3.0, 6.0]]]]))
        tensor([[9.]])
    """

    def forward(self, maps: Tensor, token: Tensor | None = None) -> Tensor:
        return maps.mean((2, 3)) + maps.amax((2, 3))


SMALLEST = 1e-6  # features are clamped to it: a root has infinite slope at 0


class GeM(Pooling, name="gem"):
    r"""Generalized mean: p = 1 is the average, a large p approaches the maximum, p = 3 is MPA's cubic GeM.

    Radenović, Tolias & Chum, TPAMI 2019 (arXiv:1711.02512), eq. 3, with one p for all channels.

    .. math:: f = \Big(\frac{1}{HW} \sum_{x} \max(x, 10^{-6})^p\Big)^{1/p}

    Example:
        >>> GeM(p=2.0)(torch.tensor([[[[1.0, 7.0]]]]))
        tensor([[5.]])
    """

    initial_p: PositiveFloat = option(default=3.0, alias="p")
    """Exponent, one for all channels; 1 is the mean, infinity the maximum."""
    learn: bool = False
    """Train p with the backbone."""

    def requirements(self) -> Iterable[Requirement]:
        if self.learn:
            tunings = ("full", "last_blocks", "lora")
            yield Requirement("backbone.tuning.name", tunings, "p is a weight of the backbone and learn is true")

    p: Tensor = option(init=False)

    def __post_init__(self) -> None:
        if self.learn:
            self.p = nn.Parameter(torch.tensor(self.initial_p))
        else:
            self.register_buffer("p", torch.tensor(self.initial_p), persistent=False)

    def forward(self, maps: Tensor, token: Tensor | None = None) -> Tensor:
        with torch.autocast(maps.device.type, enabled=False):  # 41^3 overflows float16
            maps = maps.float().clamp(min=SMALLEST)
            # 7^100 overflows float32; the mean is homogeneous, so that this factor has no gradient
            largest = maps.detach().amax((2, 3), keepdim=True)
            return largest[..., 0, 0] * (maps / largest).pow(self.p).mean((2, 3)).pow(1 / self.p)


class Cls(Pooling, name="cls"):
    """The class token; vision transformers only.

    Raises:
        ValueError: the backbone has no class token.

    Example:
        >>> import torch
        >>> Cls()(torch.zeros(1, 2, 1, 1), torch.tensor([[5.0, 6.0]]))
        tensor([[5., 6.]])
    """

    def requirements(self) -> Iterable[Requirement]:
        yield Requirement("backbone.has_class_token", (True,), "only vision transformers have a class token")

    def forward(self, maps: Tensor, token: Tensor | None = None) -> Tensor:
        if token is None:
            raise ValueError("pooling: cls needs a backbone with a class token; use a vision transformer")
        return token


import_on_demand(__name__)
