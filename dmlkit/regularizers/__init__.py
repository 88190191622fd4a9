"""Regularizers: terms that are added to any loss. Each file holds one term and its configuration."""

from dmlkit.component import load_family
from dmlkit.regularizers.base import Regularizer, RegularizerConfig
from dmlkit.regularizers.compatible import Compatible, CompatibleConfig
from dmlkit.regularizers.distill import Distill, DistillConfig
from dmlkit.regularizers.graph_consistency import GraphConsistency, GraphConsistencyConfig
from dmlkit.regularizers.hierarchical_clustering import HierarchicalClustering, HierarchicalClusteringConfig
from dmlkit.regularizers.hierarchy import Hierarchy, HierarchyConfig
from dmlkit.regularizers.threshold_consistency import ThresholdConsistency, ThresholdConsistencyConfig

__all__ = [
    "Compatible",
    "CompatibleConfig",
    "Distill",
    "DistillConfig",
    "GraphConsistency",
    "GraphConsistencyConfig",
    "HierarchicalClustering",
    "HierarchicalClusteringConfig",
    "Hierarchy",
    "HierarchyConfig",
    "Regularizer",
    "RegularizerConfig",
    "ThresholdConsistency",
    "ThresholdConsistencyConfig",
]

load_family(__name__)
