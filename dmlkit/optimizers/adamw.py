"""AdamW."""

from typing import Literal

import torch
from pydantic import PositiveFloat
from torch import nn
from torch.optim import Optimizer

from dmlkit.optimizers.base import OptimizerConfig


class AdamWConfig(OptimizerConfig, frozen=True):
    """AdamW (Loshchilov & Hutter 2019); weight decay is applied separately from the gradient."""

    name: Literal["adamw"] = "adamw"
    eps: PositiveFloat = 1e-8
    """Added to the denominator, so that steps stay finite if gradients vanish."""

    def build(self, parameters: dict[str, list[nn.Parameter]], *, fused: bool = False) -> Optimizer:
        return torch.optim.AdamW(
            self.groups(parameters), lr=self.lr, weight_decay=self.weight_decay, eps=self.eps, fused=fused
        )
