"""Samplers: select the images of each batch. Each is a pure function of seed, epoch and its state."""

from dmlkit.component import load_family
from dmlkit.samplers.base import Sampler, SamplerConfig
from dmlkit.samplers.class_balanced import ClassBalanced, Hierarchical, Paired
from dmlkit.samplers.hard_classes import HardClasses
from dmlkit.samplers.random import Random, Weighted

__all__ = ["ClassBalanced", "HardClasses", "Hierarchical", "Paired", "Random", "Sampler", "SamplerConfig", "Weighted"]

load_family(__name__)
