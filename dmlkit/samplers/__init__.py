"""Samplers: select the images of each batch. Each file holds one, a pure function of (seed, epoch)."""

from typing import TYPE_CHECKING

from dmlkit.component import load_family, missing_attribute
from dmlkit.samplers.base import Sampler, SamplerConfig
from dmlkit.samplers.class_balanced import ClassBalanced, ClassBalancedConfig
from dmlkit.samplers.hierarchical import Hierarchical, HierarchicalConfig
from dmlkit.samplers.paired import Paired, PairedConfig
from dmlkit.samplers.random import Random, RandomConfig
from dmlkit.samplers.weighted import Weighted, WeightedConfig

__all__ = [
    "ClassBalanced",
    "ClassBalancedConfig",
    "Hierarchical",
    "HierarchicalConfig",
    "Paired",
    "PairedConfig",
    "Random",
    "RandomConfig",
    "Sampler",
    "SamplerConfig",
    "Weighted",
    "WeightedConfig",
]

load_family(__name__)

if not TYPE_CHECKING:  # otherwise every name would pass the type checker

    def __getattr__(name: str) -> object:
        raise missing_attribute(__name__, name)
