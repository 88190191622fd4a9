"""The contract of metrics."""

from math import isclose

import torch
from torch import Tensor

from dmlkit.metrics import Labeled, metrics_from_hits, retrieval_metrics, score_retrieval
from dmlkit.metrics.base import MetricConfig
from dmlkit.testing.promise import expect, hold


def check_metric(config: MetricConfig) -> None:
    """Check a metric against its contract.

    The metric has a definition and returns the values that it names, by configuration and by name. If it searches, it
    gives 1 for perfect embeddings, a fraction for each query, and no less for a closer positive; the order of images
    does not matter, and pessimistic ties do not increase it.

    Example:
        >>> from dmlkit.metrics import RecallConfig
        >>> check_metric(RecallConfig(k=(1, 4)))
    """
    promises = [it_says_what_it_is, it_returns_its_names]
    if config.searches:
        promises += [
            perfect_embeddings_score_one,
            values_of_queries_are_fractions,
            the_order_of_images_does_not_matter,
            pessimistic_is_never_above_expected,
            a_closer_positive_never_lowers_it,
        ]
    hold(promises, config.name, config)


def embeddings(noise: float, count: int = 120) -> tuple[Tensor, Tensor]:
    """Return points (N, 16) around the centers of 10 classes, and labels (N,)."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(count) % 10
    centers = torch.randn(10, 16, generator=generator)
    return centers[labels] + noise * torch.randn(count, 16, generator=generator), labels


def it_says_what_it_is(config: MetricConfig) -> None:
    """Check that the metric has a definition, a unique key, and a name for each value."""
    expect(bool(config.definition), "definition is empty")
    others = [name for name, variant in config.variants.items() if variant.key == config.key and name != config.name]
    expect(not others, f"key {config.key!r} is also used by {', '.join(others)}")
    names, cutoffs = config.names(), config.cutoffs()
    has_key = config.key.split("@")[0] in names[0] or len(names) > 1
    expect(has_key, f"names {names} do not contain the key {config.key!r}")
    expect(len(set(names)) == len(names), f"names {names} contain duplicates")
    message = f"got {len(cutoffs)} cut-offs {cutoffs} for {len(names)} names {names}"
    expect(len(cutoffs) in (0, len(names)), message)


def it_returns_its_names(config: MetricConfig) -> None:
    """Check that the metric returns the values that it names, as floats, also when requested by name."""
    points, labels = embeddings(1.0)
    values = retrieval_metrics(points, labels, metrics=[config])
    expect(tuple(values) == config.names(), f"got values for {tuple(values)}, expected {config.names()}")
    expect(all(isinstance(value, float) for value in values.values()), f"got {values}, which are not all floats")
    changed = config.model_dump(exclude={"name"}, exclude_defaults=True).keys()
    if changed - {config.option_in_name()} or config.variants.get(config.name) is not type(config):
        return  # names express no other options, and refer to the registered metric
    by_name = [list(config.request_names())] if changed else [[config.name], list(config.request_names())]
    for names in by_name:
        again = retrieval_metrics(points, labels, metrics=names)
        expect(again == values, f"requested as {names} it returns {again}, by configuration {values}")


def perfect_embeddings_score_one(config: MetricConfig) -> None:
    """Check that embeddings that are equal within each class score 1, and shuffled labels less."""
    points, labels = embeddings(0.0, count=1000)  # 99 positives: precision@10 can be 1
    for name, value in retrieval_metrics(points, labels, metrics=[config]).items():
        expect(isclose(value, 1, abs_tol=1e-9), f"{name} of perfect embeddings is {value}")
    shuffled = labels[torch.randperm(1000, generator=torch.Generator().manual_seed(0))]
    for name, value in retrieval_metrics(points, shuffled, metrics=[config]).items():
        one_hit_suffices = name.startswith(("recall", "cmc"))
        expect(value < 1 or one_hit_suffices, f"{name} of shuffled labels is {value}")


def values_of_queries_are_fractions(config: MetricConfig) -> None:
    """Check that each query has a value between 0 and 1, in float64, and that their mean is the metric."""
    points, labels = embeddings(1.5)
    scores = score_retrieval(Labeled(points, labels), metrics=[config])
    for name in config.names():
        values = scores.per_query[name]
        expect(values.shape == (120,) and values.dtype == torch.float64, f"{name}: {values.dtype} {values.shape}")
        expect(((values >= 0) & (values <= 1 + 1e-12)).all(), f"{name}: from {values.min()} to {values.max()}")
        mean = values.mean().item()
        expect(isclose(scores.values[name], mean, abs_tol=1e-12), f"{name}: {scores.values[name]}, mean {mean}")


def the_order_of_images_does_not_matter(config: MetricConfig) -> None:
    """Check that the order of the images does not change the values."""
    points, labels = embeddings(1.5)
    order = torch.randperm(120, generator=torch.Generator().manual_seed(1))
    values = retrieval_metrics(points, labels, metrics=[config])
    for name, value in retrieval_metrics(points[order], labels[order], metrics=[config]).items():
        expect(isclose(value, values[name], rel_tol=1e-6, abs_tol=1e-12), f"{name}: {values[name]}, then {value}")


def pessimistic_is_never_above_expected(config: MetricConfig) -> None:
    """Check that positives placed last among ties give no query more than the mean over all orders."""
    points, labels = embeddings(1.5)
    points = points[torch.arange(120) // 4]  # four labels share each point
    expected = score_retrieval(Labeled(points, labels), metrics=[config]).per_query
    pessimistic = score_retrieval(Labeled(points, labels), metrics=[config], ties="pessimistic").per_query
    for name in config.names():
        expect((pessimistic[name] <= expected[name] + 1e-12).all(), f"{name} is larger with pessimistic ties")


def a_closer_positive_never_lowers_it(config: MetricConfig) -> None:
    """Check that moving a positive to the front of a list of hits decreases no value."""
    generator = torch.Generator().manual_seed(2)
    hits = torch.rand(40, 60, generator=generator) < 0.2
    hits[:, 30] = True
    better = hits.clone()
    better[:, 0], better[:, 30] = True, hits[:, 0]
    positives = hits.sum(1)
    before, after = (metrics_from_hits(lists, positives, [config]) for lists in (hits, better))
    for name in before:
        expect(after[name] >= before[name] - 1e-12, f"{name} decreases from {before[name]} to {after[name]}")
