"""Metrics: named floats computed from rankings of neighbors, or from embeddings. Each module has one family."""

from typing import TYPE_CHECKING

from dmlkit.component import import_on_demand

if TYPE_CHECKING:
    from dmlkit.metrics.base import Labeled, MetricConfig, Points, Ranking, Targets
    from dmlkit.metrics.clustering import AmiConfig, AriConfig, F1Config, NmiConfig
    from dmlkit.metrics.distribution import NormConfig, SpectrumConfig, SpreadConfig
    from dmlkit.metrics.open_set import AurocUnknownConfig, BaksConfig, BausConfig, OscrConfig
    from dmlkit.metrics.retrieval import (
        CmcConfig,
        GradedNdcgConfig,
        HierarchicalApConfig,
        MapAtKConfig,
        MapAtRConfig,
        MapConfig,
        MrrConfig,
        NdcgConfig,
        PrecisionConfig,
        RecallConfig,
        RPrecisionConfig,
    )
    from dmlkit.metrics.scoring import metric_configs, metrics_from_hits, retrieval_metrics, score_retrieval
    from dmlkit.metrics.verification import EerConfig, RocAucConfig, TarAtFarConfig

__all__ = [
    "AmiConfig",
    "AriConfig",
    "AurocUnknownConfig",
    "BaksConfig",
    "BausConfig",
    "CmcConfig",
    "EerConfig",
    "F1Config",
    "GradedNdcgConfig",
    "HierarchicalApConfig",
    "Labeled",
    "MapAtKConfig",
    "MapAtRConfig",
    "MapConfig",
    "MetricConfig",
    "MrrConfig",
    "NdcgConfig",
    "NmiConfig",
    "NormConfig",
    "OscrConfig",
    "Points",
    "PrecisionConfig",
    "RPrecisionConfig",
    "Ranking",
    "RecallConfig",
    "RocAucConfig",
    "SpectrumConfig",
    "SpreadConfig",
    "TarAtFarConfig",
    "Targets",
    "metric_configs",
    "metrics_from_hits",
    "retrieval_metrics",
    "score_retrieval",
]

import_on_demand(__name__)
