"""Miners: select the pairs or triplets that a pair loss uses. Each file holds one."""

from typing import TYPE_CHECKING

from dmlkit.component import load_family, missing_attribute
from dmlkit.miners.all import All, AllConfig
from dmlkit.miners.base import Miner, MinerConfig, Triplets
from dmlkit.miners.distance_weighted import DistanceWeighted, DistanceWeightedConfig
from dmlkit.miners.hard import Hard, HardConfig
from dmlkit.miners.semi_hard import SemiHard, SemiHardConfig

__all__ = [
    "All",
    "AllConfig",
    "DistanceWeighted",
    "DistanceWeightedConfig",
    "Hard",
    "HardConfig",
    "Miner",
    "MinerConfig",
    "SemiHard",
    "SemiHardConfig",
    "Triplets",
]

load_family(__name__)

if not TYPE_CHECKING:  # otherwise every name would pass the type checker

    def __getattr__(name: str) -> object:
        raise missing_attribute(__name__, name)
