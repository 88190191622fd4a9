"""LoRA tuning: frozen weights, each with a trainable low-rank update."""

from collections.abc import Iterator
from typing import Literal

import torch
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.nn.utils import parametrize

from dmlkit.backbones.tuning.base import Blocks, TuningConfig, poolings
from dmlkit.errors import UserError

Targets = Literal["attention", "all"]
Weight = tuple[nn.Module, str]
"""A module and the name of its parameter."""


class LoRAConfig(TuningConfig, frozen=True):
    """Low-rank adaptation (Hu et al. 2022): all weights are frozen, and small low-rank updates of them train."""

    name: Literal["lora"] = "lora"
    rank: PositiveInt = 8
    """Rank r of each update. A weight gets no update if the update would have as many numbers as the weight."""
    alpha: PositiveFloat = 16.0
    """Updates are multiplied by alpha / rank, so that the learning rate need not change with the rank."""
    targets: Targets = "attention"
    """``attention``: update the weights of attention layers; ``all``: of every linear layer and convolution."""

    def trained_modules(self, backbone: nn.Module, blocks: Blocks) -> list[nn.Module]:
        return poolings(backbone)

    def adapt(self, backbone: nn.Module) -> None:
        found = list(dict.fromkeys(attention_weights(backbone) if self.targets == "attention" else weights(backbone)))
        if not found:
            raise UserError(
                f"backbone.tuning.targets: got {self.targets}, but this backbone has no attention layers; use all"
            )
        fitting = [place for place in found if is_smaller(self.rank, getattr(*place))]
        if not fitting:
            raise UserError(
                f"backbone.tuning.rank: got {self.rank}, with which no update is smaller than its weight; use a "
                "smaller rank"
            )
        for module, name in fitting:
            update = LowRankUpdate(getattr(module, name), rank=self.rank, alpha=self.alpha)
            parametrize.register_parametrization(module, name, update)


class LowRankUpdate(nn.Module):
    r"""Low-rank update of a weight matrix, Hu et al., ICLR 2022 (arXiv:2106.09685), eq. 3.

    .. math:: W' = W + \frac{\alpha}{r} B A

    A is initialized from a normal distribution, B with 0. The update is a torch parametrization, so that it fits any
    layer: torch's attention reads ``in_proj_weight`` and ``out_proj.weight`` directly, without a layer to wrap, and
    peft has to merge and unmerge the update at each call.

    Args:
        weight: W (m, n), or the weight (m, ...) of a convolution with n numbers per output.
        rank: r.
        alpha: factor of the update, times r.

    Example:
        >>> layer = nn.Linear(6, 4)
        >>> _ = parametrize.register_parametrization(layer, "weight", LowRankUpdate(layer.weight, rank=1, alpha=2.0))
        >>> [tuple(parameter.shape) for parameter in layer.parametrizations.weight[0].parameters()]
        [(1, 6), (4, 1)]
    """

    def __init__(self, weight: Tensor, *, rank: int, alpha: float) -> None:
        super().__init__()
        rows, columns = weight.flatten(1).shape
        # with this standard deviation A x is as large as x
        self.down = nn.Parameter(columns**-0.5 * torch.randn(rank, columns, dtype=weight.dtype))  # A
        self.up = nn.Parameter(torch.zeros(rows, rank, dtype=weight.dtype))  # B
        self.scale = alpha / rank

    def forward(self, weight: Tensor) -> Tensor:
        """Compute W' from W."""
        with torch.autocast(weight.device.type, enabled=False):  # a product in bfloat16 would be off by 4e-3
            return weight + self.scale * (self.up @ self.down).view(weight.shape)


def is_smaller(rank: int, weight: Tensor) -> bool:
    """Return whether an update of this rank has fewer numbers than the weight.

    Example:
        >>> [is_smaller(8, torch.empty(*shape)) for shape in ((384, 384), (16, 16), (64, 3, 7, 7))]
        [True, False, True]
    """
    rows, columns = weight.flatten(1).shape
    return rank * (rows + columns) < rows * columns


def weights(backbone: nn.Module) -> Iterator[Weight]:
    """Yield the weights of linear layers and convolutions, and the input projection of torch's attention."""
    for module in backbone.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            yield module, "weight"
        elif isinstance(module, nn.MultiheadAttention):
            yield module, "in_proj_weight"


def attention_weights(backbone: nn.Module) -> Iterator[Weight]:
    """Yield the weights of attention layers, of torch or timm, which all have "Attention" in their class name."""
    for module in backbone.modules():
        if "Attention" in type(module).__name__:
            yield from weights(module)


def merge(backbone: nn.Module) -> None:
    """Replace W by W' and remove the updates; outputs stay the same within rounding."""
    for module in list(backbone.modules()):
        for name, parametrizations in dict(getattr(module, "parametrizations", {})).items():
            if isinstance(parametrizations[0], LowRankUpdate):
                parametrize.remove_parametrizations(module, name, leave_parametrized=True)
