"""Pooling: from feature maps to one vector. Each file holds one."""

from typing import TYPE_CHECKING

from dmlkit.component import load_family, missing_attribute
from dmlkit.pooling.avg import Avg, AvgConfig
from dmlkit.pooling.avg_max import AvgMax, AvgMaxConfig
from dmlkit.pooling.base import Pooling, PoolingConfig
from dmlkit.pooling.cls import Cls, ClsConfig
from dmlkit.pooling.gem import GeM, GeMConfig
from dmlkit.pooling.max import Max, MaxConfig

__all__ = [
    "Avg",
    "AvgConfig",
    "AvgMax",
    "AvgMaxConfig",
    "Cls",
    "ClsConfig",
    "GeM",
    "GeMConfig",
    "Max",
    "MaxConfig",
    "Pooling",
    "PoolingConfig",
]

load_family(__name__)

if not TYPE_CHECKING:  # otherwise every name would pass the type checker

    def __getattr__(name: str) -> object:
        raise missing_attribute(__name__, name)
