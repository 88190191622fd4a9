"""Samplers: select the images of each batch. Each is a pure function of seed, epoch and its state."""

from typing import TYPE_CHECKING

from dmlkit.component import import_on_demand

if TYPE_CHECKING:
    from dmlkit.samplers.base import Sampler, SamplerConfig
    from dmlkit.samplers.class_balanced import ClassBalanced, Hierarchical, Paired
    from dmlkit.samplers.hard_classes import HardClasses
    from dmlkit.samplers.random import Random, Weighted

__all__ = ["ClassBalanced", "HardClasses", "Hierarchical", "Paired", "Random", "Sampler", "SamplerConfig", "Weighted"]

import_on_demand(__name__)
