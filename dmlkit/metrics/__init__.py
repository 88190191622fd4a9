"""Metrics: named floats from ranked neighbours or embeddings. Each file holds one."""

from typing import Any

from dmlkit.component import load_family, missing_attribute
from dmlkit.metrics.retrieval import retrieval_metrics

__all__ = ["retrieval_metrics"]

load_family(__name__)


def __getattr__(name: str) -> Any:
    raise missing_attribute(__name__, name)
