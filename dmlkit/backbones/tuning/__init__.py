"""Tunings, which choose the weights of a backbone that train; one file per tuning."""

from typing import TYPE_CHECKING

from dmlkit.backbones.tuning.base import TuningConfig
from dmlkit.backbones.tuning.full import FullTuningConfig
from dmlkit.backbones.tuning.last_blocks import LastBlocksConfig
from dmlkit.backbones.tuning.lora import LoRAConfig
from dmlkit.backbones.tuning.none import NoTuningConfig
from dmlkit.component import load_family, missing_attribute

__all__ = [
    "FullTuningConfig",
    "LastBlocksConfig",
    "LoRAConfig",
    "NoTuningConfig",
    "TuningConfig",
]

load_family(__name__)

if not TYPE_CHECKING:  # else every name would pass the type checker

    def __getattr__(name: str) -> object:
        raise missing_attribute(__name__, name)
