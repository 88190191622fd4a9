"""Regularizers: weighted terms that can be added to any loss. Each file holds one."""

from typing import TYPE_CHECKING

from dmlkit.component import load_family, missing_attribute
from dmlkit.regularizers.base import Regularizer, RegularizerConfig
from dmlkit.regularizers.graph_consistency import GraphConsistency, GraphConsistencyConfig

__all__ = [
    "GraphConsistency",
    "GraphConsistencyConfig",
    "Regularizer",
    "RegularizerConfig",
]

load_family(__name__)

if not TYPE_CHECKING:  # otherwise every name would pass the type checker

    def __getattr__(name: str) -> object:
        raise missing_attribute(__name__, name)
