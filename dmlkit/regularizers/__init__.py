"""Regularizers: terms that are added to any loss. Each file holds one term."""

from dmlkit.component import load_family
from dmlkit.regularizers.base import Regularizer, RegularizerConfig
from dmlkit.regularizers.compatible import Compatible
from dmlkit.regularizers.distill import Distill
from dmlkit.regularizers.graph_consistency import GraphConsistency
from dmlkit.regularizers.hierarchical_clustering import HierarchicalClustering
from dmlkit.regularizers.hierarchy import Hierarchy
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

load_family(__name__)
