"""Metrics: named floats from ranked neighbours or embeddings. Each file holds one."""

from typing import TYPE_CHECKING

from dmlkit.component import load_family, missing_attribute
from dmlkit.metrics.ami import AmiConfig
from dmlkit.metrics.ari import AriConfig
from dmlkit.metrics.auroc_unknown import AurocUnknownConfig
from dmlkit.metrics.baks import BaksConfig
from dmlkit.metrics.base import MetricConfig, Points, Ranking, Targets
from dmlkit.metrics.baus import BausConfig
from dmlkit.metrics.cmc import CmcConfig
from dmlkit.metrics.eer import EerConfig
from dmlkit.metrics.f1 import F1Config
from dmlkit.metrics.map_at_k import MapAtKConfig
from dmlkit.metrics.map_at_r import MapAtRConfig
from dmlkit.metrics.mrr import MrrConfig
from dmlkit.metrics.ndcg import NdcgConfig
from dmlkit.metrics.nmi import NmiConfig
from dmlkit.metrics.norm import NormConfig
from dmlkit.metrics.oscr import OscrConfig
from dmlkit.metrics.precision import PrecisionConfig
from dmlkit.metrics.r_precision import RPrecisionConfig
from dmlkit.metrics.recall import RecallConfig
from dmlkit.metrics.roc_auc import RocAucConfig
from dmlkit.metrics.scoring.hits import metrics_from_hits
from dmlkit.metrics.scoring.names import metric_configs
from dmlkit.metrics.scoring.retrieval import retrieval_metrics, score_retrieval
from dmlkit.metrics.spectrum import SpectrumConfig
from dmlkit.metrics.spread import SpreadConfig
from dmlkit.metrics.tar_at_far import TarAtFarConfig

__all__ = [
    "AmiConfig",
    "AriConfig",
    "AurocUnknownConfig",
    "BaksConfig",
    "BausConfig",
    "CmcConfig",
    "EerConfig",
    "F1Config",
    "MapAtKConfig",
    "MapAtRConfig",
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

load_family(__name__)

if not TYPE_CHECKING:  # else every name would pass the type checker

    def __getattr__(name: str) -> object:
        raise missing_attribute(__name__, name)
