"""Every metric of the family keeps the contract of `MetricConfig`."""

import pytest
import torch

from dmlkit.metrics import retrieval_metrics, score_retrieval
from dmlkit.metrics.base import MetricConfig

VARIANTS = sorted(MetricConfig.variants)
SEARCHING = [name for name in VARIANTS if MetricConfig.variants[name].searches]
CLUSTERING = ["nmi", "ami", "ari", "f1"]
PAIRS = ["eer", "roc_auc", "tar_at_far"]


def embeddings(noise: float, count: int = 120) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(count) % 10
    return torch.randn(10, 16, generator=generator)[labels] + noise * torch.randn(
        count, 16, generator=generator
    ), labels


def config_of(name: str) -> MetricConfig:
    """The metric as it comes; a threshold has no default."""
    variant = MetricConfig.variants[name]
    return variant(threshold=(0.5,)) if variant.listed() == "threshold" else variant()


@pytest.mark.parametrize("name", VARIANTS)
def test_it_says_what_it_is(name):
    config = config_of(name)
    assert config.definition
    assert config.key.split("@")[0] in config.names()[0] or len(config.names()) > 1
    assert len(set(config.names())) == len(config.names())
    assert not config.cutoffs() or len(config.cutoffs()) == len(config.names())


@pytest.mark.parametrize("name", VARIANTS)
def test_it_returns_its_names_by_config_and_by_name(name):
    config = config_of(name)
    points, labels = embeddings(1.0)
    values = retrieval_metrics(points, labels, metrics=[config])
    assert tuple(values) == config.names()
    assert all(isinstance(value, float) for value in values.values())
    if config.listed() != "threshold":
        assert retrieval_metrics(points, labels, metrics=[name]) == values
    assert retrieval_metrics(points, labels, metrics=list(config.asked())) == values


@pytest.mark.parametrize("name", [*SEARCHING, *CLUSTERING])
def test_perfect_embeddings_score_one_and_random_ones_less(name):
    config = config_of(name)
    points, labels = embeddings(0.0, count=1000)  # 99 positives: precision@10 can be 1
    perfect = retrieval_metrics(points, labels, metrics=[config])
    if name in SEARCHING or retrieval_metrics(points, labels, metrics=["nmi"])["nmi"] > 0.999:
        assert list(perfect.values()) == pytest.approx([1.0] * len(perfect), abs=1e-9)
    shuffled = labels[torch.randperm(1000, generator=torch.Generator().manual_seed(0))]
    for key, value in retrieval_metrics(points, shuffled, metrics=[config]).items():
        assert value < 1 or key.startswith(("recall", "cmc"))


@pytest.mark.parametrize("name", SEARCHING)
def test_values_of_queries_are_fractions_and_their_mean_is_the_metric(name):
    config = config_of(name)
    points, labels = embeddings(1.5)
    scores = score_retrieval(points, labels, metrics=[config])
    for key in config.names():
        values = scores.per_query[key]
        assert values.shape == (120,)
        assert values.dtype == torch.float64
        assert ((values >= 0) & (values <= 1 + 1e-12)).all()
        assert scores.values[key] == pytest.approx(values.mean().item(), abs=1e-12)


@pytest.mark.parametrize("name", [*SEARCHING, *PAIRS])
def test_the_order_of_images_does_not_matter(name):
    config = config_of(name)
    points, labels = embeddings(1.5)
    order = torch.randperm(120, generator=torch.Generator().manual_seed(1))
    values = retrieval_metrics(points, labels, metrics=[config])
    assert retrieval_metrics(points[order], labels[order], metrics=[config]) == pytest.approx(values, abs=1e-12)


@pytest.mark.parametrize("name", SEARCHING)
def test_pessimistic_is_never_above_expected(name):
    config = config_of(name)
    points, labels = embeddings(1.5)
    points = points[torch.arange(120) // 4]  # four labels share each point
    expected = score_retrieval(points, labels, metrics=[config]).per_query
    pessimistic = score_retrieval(points, labels, metrics=[config], ties="pessimistic").per_query
    for key in config.names():
        assert (pessimistic[key] <= expected[key] + 1e-12).all()


@pytest.mark.parametrize("name", SEARCHING)
def test_a_closer_positive_never_lowers_it(name):
    """Swap a query's best positive to the front of a hit list: no metric may fall."""
    from dmlkit.metrics import metrics_from_hits

    config = config_of(name)
    generator = torch.Generator().manual_seed(2)
    hits = torch.rand(40, 60, generator=generator) < 0.2
    hits[:, 30] = True
    better = hits.clone()
    better[:, 0], better[:, 30] = True, hits[:, 0]
    positives = hits.sum(1)
    before, after = (metrics_from_hits(lists, positives, [config]) for lists in (hits, better))
    assert all(after[key] >= before[key] - 1e-12 for key in before)
