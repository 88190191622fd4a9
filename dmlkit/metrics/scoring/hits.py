"""Metrics of hit lists, for those who have ranked already."""

import warnings
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from dmlkit.metrics.base import MetricConfig, Ranking
from dmlkit.metrics.ranking.inputs import Array
from dmlkit.metrics.scoring.names import metric_configs


def metrics_from_hits(hits: Array, positives: Array, metrics: Sequence[MetricConfig | str]) -> dict[str, float]:
    """Score lists that were ranked elsewhere.

    Args:
        hits: (N, K) bool or 0/1; whether neighbour k of query n, nearest first and without n itself, is right.
        positives: (N,) integers >= 0; R, how many right items the gallery has. Queries with 0 are left out.
        metrics: search metrics, as configs or names.

    Returns:
        Fractions by name. A k beyond K is clipped, and MRR counts 0 where no hit is listed: both give a warning.

    Raises:
        ValueError: wrong shapes, more hits than positives, a metric that does not search, or one at R where a list
            ends before R.

    Example:
        >>> metrics_from_hits([[1, 0, 1, 0]], [2], ["precision@1", "map@4"])
        {'precision@1': 1.0, 'map@4': 0.8333333333333333}
    """
    configs = metric_configs(metrics)
    for config in configs:
        if not config.searches:
            raise ValueError(f"metrics: {config.key} is made of embeddings, not of hits")
    found, counts = torch.as_tensor(hits), torch.as_tensor(positives)
    check_hits(found, counts)
    found, left_out = found[counts > 0].bool(), int((counts == 0).sum())
    ranking = ranking_of_hits(found, counts[counts > 0])
    short = (ranking.positives > found.shape[1]) & (found.sum(1) < ranking.positives)
    for config in configs:
        if config.to_r and short.any():
            raise ValueError(
                f"hits: {config.key} needs the first R items, {int(short.sum())} lists of {found.shape[1]} end before"
            )
    if left_out:
        warnings.warn(f"{left_out} of {len(counts)} queries have no positive and are left out", stacklevel=2)
    if any(config.key == "mrr" for config in configs) and not found.any(1).all():
        warnings.warn(f"mrr counts 0 for the {int((~found.any(1)).sum())} queries without a listed hit", stacklevel=2)
    for note in clip_notes(configs, found.shape[1]):
        warnings.warn(note, stacklevel=2)
    return {name: float(value.mean()) for config in configs for name, value in config.per_query(ranking).items()}


def check_hits(hits: Tensor, positives: Tensor) -> None:
    """Refuse hit lists that contradict themselves.

    Raises:
        ValueError: says what came and what was expected.

    Example:
        >>> check_hits(torch.tensor([[1, 1]]), torch.tensor([1]))
        Traceback (most recent call last):
        ...
        ValueError: hits: query 0 has 2 hits but 1 positives
    """
    if hits.ndim != 2 or 0 in hits.shape:
        raise ValueError(f"hits: expected shape (N, K), got {tuple(hits.shape)}")
    if positives.shape != hits.shape[:1] or positives.is_floating_point():
        raise ValueError(
            f"positives: expected {len(hits)} integers, got {positives.dtype} of shape {tuple(positives.shape)}"
        )
    if not ((hits == 0) | (hits == 1)).all():
        raise ValueError("hits: expected only 0 and 1")
    excess = (hits.bool().sum(1) > positives).nonzero()
    if len(excess):
        query = int(excess[0])
        raise ValueError(f"hits: query {query} has {int(hits[query].sum())} hits but {int(positives[query])} positives")
    if not (positives > 0).any():
        raise ValueError("positives: no query has any; nothing to score")


def ranking_of_hits(hits: Tensor, positives: Tensor) -> Ranking:
    """The ranking that hits (N, K) bool say, without ties; positives that are not listed count as never found."""
    depth = hits.shape[1]
    width = max(1, int(hits.sum(1).max()))
    place = torch.arange(depth, device=hits.device).expand_as(hits)
    above = place.masked_fill(~hits, depth).sort(1).values[:, :width]
    ones = torch.ones_like(above)
    column = torch.arange(width, device=hits.device).expand_as(above)
    return Ranking(above, ones, column, ones, positives.long(), torch.full_like(positives, depth, dtype=torch.int64))


def clip_notes(configs: Sequence[MetricConfig], gallery: int) -> Iterator[str]:
    """What to say of cut-offs beyond a gallery of ``gallery`` items.

    Example:
        >>> from dmlkit.metrics import RecallConfig
        >>> list(clip_notes([RecallConfig(k=(1, 1000))], 49))
        ['recall@1000: only 49 items are ranked; k is clipped to that']
    """
    for config in configs:
        for name, k in zip(config.names(), config.cutoffs(), strict=False):
            if k > gallery:
                yield f"{name}: only {gallery} items are ranked; k is clipped to that"
