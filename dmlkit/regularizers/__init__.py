"""Regularizers: terms that are added to any loss. A file holds one term, or two of one story."""

from typing import TYPE_CHECKING

from dmlkit.component import import_on_demand

if TYPE_CHECKING:
    from dmlkit.regularizers.base import Regularizer, RegularizerConfig
    from dmlkit.regularizers.graph_consistency import GraphConsistency
    from dmlkit.regularizers.hierarchical_clustering import HierarchicalClustering
    from dmlkit.regularizers.hierarchy import Hierarchy
    from dmlkit.regularizers.other_run import Compatible, Distill
    from dmlkit.regularizers.threshold_consistency import ThresholdConsistency

__all__ = [
    "Compatible",
    "Distill",
    "GraphConsistency",
    "HierarchicalClustering",
    "Hierarchy",
    "Regularizer",
    "RegularizerConfig",
    "ThresholdConsistency",
]

import_on_demand(__name__)
