"""Adam."""

from typing import Literal

import torch
from pydantic import PositiveFloat
from torch import nn
from torch.optim import Optimizer

from dmlkit.optimizers.base import OptimizerConfig


class AdamConfig(OptimizerConfig, frozen=True):
    """Adam (Kingma & Ba 2015); weight decay is added to the gradient."""

    name: Literal["adam"] = "adam"
    eps: PositiveFloat = 1e-8
    """Added to the denominator, so that steps stay finite if gradients vanish."""

    def build(self, parameters: dict[str, list[nn.Parameter]], *, fused: bool = False) -> Optimizer:
        return torch.optim.Adam(
            self.groups(parameters), lr=self.lr, weight_decay=self.weight_decay, eps=self.eps, fused=fused
        )
