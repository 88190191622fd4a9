"""Optimizers. Each file holds one."""

from typing import TYPE_CHECKING

from dmlkit.component import load_family, missing_attribute
from dmlkit.optimizers.adam import AdamConfig
from dmlkit.optimizers.adamw import AdamWConfig
from dmlkit.optimizers.base import LearningRateMultipliers, OptimizerConfig
from dmlkit.optimizers.riemannian_adam import RiemannianAdamConfig
from dmlkit.optimizers.riemannian_sgd import RiemannianSGDConfig

__all__ = [
    "AdamConfig",
    "AdamWConfig",
    "LearningRateMultipliers",
    "OptimizerConfig",
    "RiemannianAdamConfig",
    "RiemannianSGDConfig",
]

load_family(__name__)

if not TYPE_CHECKING:  # otherwise every name would pass the type checker

    def __getattr__(name: str) -> object:
        raise missing_attribute(__name__, name)
