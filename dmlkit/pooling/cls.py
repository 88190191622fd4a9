"""The class token of a transformer."""

from collections.abc import Iterable
from typing import Literal

from torch import Tensor

from dmlkit.component import Requirement
from dmlkit.pooling.base import Pooling, PoolingConfig


class ClsConfig(PoolingConfig, frozen=True):
    """The class token; vision transformers only."""

    name: Literal["cls"] = "cls"

    def build(self) -> "Cls":
        return Cls()

    def requirements(self) -> Iterable[Requirement]:
        yield Requirement("backbone.name", ("vit", "timm"), "only vision transformers have a class token")


class Cls(Pooling):
    """The class token, which attends to all positions.

    Raises:
        ValueError: the backbone has no class token.

    Example:
        >>> import torch
        >>> Cls()(torch.zeros(1, 2, 1, 1), torch.tensor([[5.0, 6.0]]))
        tensor([[5., 6.]])
    """

    def forward(self, maps: Tensor, token: Tensor | None = None) -> Tensor:
        if token is None:
            raise ValueError("pooling: cls needs a backbone with a class token; use a vision transformer")
        return token
