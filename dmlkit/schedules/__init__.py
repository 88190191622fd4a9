"""Learning-rate schedules: pure functions of the step. Each file holds one."""

from typing import TYPE_CHECKING

from dmlkit.component import load_family, missing_attribute
from dmlkit.schedules.base import ScheduleConfig
from dmlkit.schedules.constant import ConstantConfig
from dmlkit.schedules.cosine import CosineConfig
from dmlkit.schedules.step import StepConfig

__all__ = [
    "ConstantConfig",
    "CosineConfig",
    "ScheduleConfig",
    "StepConfig",
]

load_family(__name__)

if not TYPE_CHECKING:  # otherwise every name would pass the type checker

    def __getattr__(name: str) -> object:
        raise missing_attribute(__name__, name)
