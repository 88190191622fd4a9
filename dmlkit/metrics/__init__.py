"""Metrics: named floats from ranked neighbours or embeddings. Each file holds one."""

from typing import TYPE_CHECKING

from dmlkit.component import load_family, missing_attribute
from dmlkit.metrics.ami import AmiConfig
from dmlkit.metrics.base import MetricConfig, Points, Ranking
from dmlkit.metrics.cmc import CmcConfig
from dmlkit.metrics.f1 import F1Config
from dmlkit.metrics.map_at_k import MapAtKConfig
from dmlkit.metrics.map_at_r import MapAtRConfig
from dmlkit.metrics.mrr import MrrConfig
from dmlkit.metrics.ndcg import NdcgConfig
from dmlkit.metrics.nmi import NmiConfig
from dmlkit.metrics.precision import PrecisionConfig
from dmlkit.metrics.r_precision import RPrecisionConfig
from dmlkit.metrics.recall import RecallConfig
from dmlkit.metrics.scoring.hits import metrics_from_hits
from dmlkit.metrics.scoring.names import metric_configs
from dmlkit.metrics.scoring.retrieval import retrieval_metrics, score_retrieval
from dmlkit.metrics.spectrum import SpectrumConfig
from dmlkit.metrics.spread import SpreadConfig

__all__ = [
    "AmiConfig",
    "CmcConfig",
    "F1Config",
    "MapAtKConfig",
    "MapAtRConfig",
    "MetricConfig",
    "MrrConfig",
    "NdcgConfig",
    "NmiConfig",
    "Points",
    "PrecisionConfig",
    "RPrecisionConfig",
    "Ranking",
    "RecallConfig",
    "SpectrumConfig",
    "SpreadConfig",
    "metric_configs",
    "metrics_from_hits",
    "retrieval_metrics",
    "score_retrieval",
]

load_family(__name__)

if not TYPE_CHECKING:  # else every name would pass the type checker

    def __getattr__(name: str) -> object:
        raise missing_attribute(__name__, name)
