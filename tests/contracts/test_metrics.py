"""Every metric of the family keeps the contract of `MetricConfig`."""

import pytest

from dmlkit.metrics import retrieval_metrics
from dmlkit.metrics.base import MetricConfig
from dmlkit.testing.metrics import (
    METRIC,
    OF_POINTS,
    embeddings,
    perfect_embeddings_score_one,
    shuffled_labels_score_less,
    the_order_of_images_does_not_matter,
)
from dmlkit.testing.promise import Promise, hold


def config_of(name: str) -> MetricConfig:
    """The metric as it comes; a threshold has no default."""
    variant = MetricConfig.variants[name]
    return variant(threshold=(0.5,)) if "threshold" in variant.model_fields else variant()


CASES = [
    pytest.param(promise, name, id=f"{name}-{promise.__name__}")
    for name, variant in sorted(MetricConfig.variants.items())
    for promise in (METRIC if variant.searches else OF_POINTS)
]


@pytest.mark.parametrize(("promise", "name"), CASES)
def test_contract(promise: Promise, name: str):
    hold([promise], name, config_of(name))


@pytest.mark.parametrize("name", ["nmi", "ami", "ari", "f1"])
def test_perfect_clusters_score_one_and_shuffled_labels_less(name: str):
    points, labels = embeddings(0.0, count=1000)
    found = retrieval_metrics(points, labels, metrics=["nmi"])["nmi"] > 0.999  # all clusters are
    promise = perfect_embeddings_score_one if found else shuffled_labels_score_less
    hold([promise], name, config_of(name))


@pytest.mark.parametrize("name", ["eer", "roc_auc", "tar_at_far"])
def test_the_order_of_images_does_not_matter_to_metrics_of_pairs(name: str):
    hold([the_order_of_images_does_not_matter], name, config_of(name))
