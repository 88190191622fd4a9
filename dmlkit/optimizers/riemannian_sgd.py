"""Riemannian SGD of geoopt: parameters that are points of a manifold stay on it."""

from typing import Literal

from pydantic import Field
from torch import nn
from torch.optim import Optimizer

from dmlkit.manifolds.numerics.load_geoopt import load_geoopt
from dmlkit.optimizers.base import OptimizerConfig


class RiemannianSGDConfig(OptimizerConfig, frozen=True):
    """Riemannian SGD (Bonnabel 2013); ordinary parameters take ordinary SGD steps."""

    name: Literal["riemannian_sgd"] = "riemannian_sgd"
    momentum: float = Field(0.9, ge=0, lt=1)
    """Fraction of the previous step that is added to each step."""

    def build(self, parameters: dict[str, list[nn.Parameter]], *, fused: bool = False) -> Optimizer:
        # stabilize: project back every 10 steps, so that rounding errors do not accumulate
        options = {"lr": self.lr, "weight_decay": self.weight_decay, "momentum": self.momentum}
        return load_geoopt().optim.RiemannianSGD(self.groups(parameters), stabilize=10, **options)
