"""Metrics: named floats from ranked neighbours or embeddings. Each file holds one."""

from typing import Any

from dmlkit.component import load_family, missing_attribute
from dmlkit.metrics.scoring.hits import metrics_from_hits
from dmlkit.metrics.scoring.names import metric_configs
from dmlkit.metrics.scoring.retrieval import retrieval_metrics, score_retrieval

__all__ = ["metric_configs", "metrics_from_hits", "retrieval_metrics", "score_retrieval"]

load_family(__name__)


def __getattr__(name: str) -> Any:
    raise missing_attribute(__name__, name)
