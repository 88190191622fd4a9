"""Riemannian Adam of geoopt: parameters that are points of a manifold stay on it."""

from typing import Literal

from pydantic import PositiveFloat
from torch import nn
from torch.optim import Optimizer

from dmlkit.manifolds.numerics.load_geoopt import load_geoopt
from dmlkit.optimizers.base import OptimizerConfig


class RiemannianAdamConfig(OptimizerConfig, frozen=True):
    """Riemannian Adam (Bécigneul & Ganea 2019); ordinary parameters take ordinary Adam steps."""

    name: Literal["riemannian_adam"] = "riemannian_adam"
    eps: PositiveFloat = 1e-8
    """Added to the denominator, so that steps stay finite if gradients vanish."""

    def build(self, parameters: dict[str, list[nn.Parameter]], *, fused: bool = False) -> Optimizer:
        # stabilize: project back every 10 steps, so that rounding errors do not accumulate
        return load_geoopt().optim.RiemannianAdam(
            self.groups(parameters), lr=self.lr, weight_decay=self.weight_decay, eps=self.eps, stabilize=10
        )
