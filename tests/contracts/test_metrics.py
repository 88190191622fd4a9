"""Every metric of the family keeps the contract of `MetricConfig`."""

import pytest

from dmlkit.metrics.base import MetricConfig
from dmlkit.testing import check_metric
from dmlkit.testing.metrics import perfect_embeddings_score_one, the_order_of_images_does_not_matter
from dmlkit.testing.promise import hold


def config_of(name: str) -> MetricConfig:
    """The metric as it comes; a threshold has no default."""
    variant = MetricConfig.variants[name]
    return variant(threshold=(0.5,)) if "threshold" in variant.model_fields else variant()


@pytest.mark.parametrize("name", sorted(MetricConfig.variants))
def test_contract(name: str):
    check_metric(config_of(name))


@pytest.mark.parametrize("name", ["nmi", "ami", "ari", "f1"])
def test_perfect_clusters_score_one_and_shuffled_labels_less(name: str):
    hold([perfect_embeddings_score_one], name, config_of(name))


@pytest.mark.parametrize("name", ["eer", "roc_auc", "tar_at_far"])
def test_the_order_of_images_does_not_matter_to_metrics_of_pairs(name: str):
    hold([the_order_of_images_does_not_matter], name, config_of(name))
