"""Compute metrics: from embeddings and labels to named figures."""

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch import Tensor

from dmlkit.manifolds.base import Manifold
from dmlkit.metrics.base import MetricConfig, Points, Ranking, Targets
from dmlkit.metrics.ranking.rankings import (
    Array,
    Ties,
    as_embeddings,
    as_keys,
    as_points,
    build_search,
    default_manifold,
    rankings,
    refuse_what_is_no_point,
    search_vectors,
)
from dmlkit.metrics.ranking.search import Search

_NEAREST = "nearest"
DEFAULT_METRICS = ("recall@1", "r_precision", "map@r")


@dataclass(frozen=True)
class Scores:
    """Metrics and what they are made of.

    Args:
        values: the metrics by name.
        definitions: what each metric is, by name, one line each.
        per_query: (Q',) float64 by name, for the metrics that are means over queries.
        queries: (Q',) int64, the queries that were scored: those with a positive.
        nearest: (Q',) int64, the gallery item nearest to each.
        left_out: how many queries have no positive.
        notes: what a reader of the figures must know: clipped cut-offs, queries left out.
    """

    values: dict[str, float]
    definitions: dict[str, str]
    per_query: dict[str, Tensor]
    queries: Tensor
    nearest: Tensor
    left_out: int
    notes: tuple[str, ...]


def retrieval_metrics(
    embeddings: Array,
    labels: Array,
    gallery: Array | None = None,
    gallery_labels: Array | None = None,
    manifold: Manifold | None = None,
    metrics: Sequence[MetricConfig | str] = DEFAULT_METRICS,
    *,
    ids: Array | None = None,
    gallery_ids: Array | None = None,
    ties: Ties = "expected",
    group: Any = None,
) -> dict[str, float]:
    """Score embeddings by searching each one among all the others, or among a gallery.

    - A query is never its own neighbour: without a gallery it is left out by its position, with a gallery and ids
      by its id, however many duplicates it has. A gallery without ids leaves nothing out (In-Shop).
    - Items of the same score are counted by the expected value over their orders; ``ties="pessimistic"`` puts
      the right ones last. Equal gallery vectors always tie; other scores tie if equal in floating point.
    - A k beyond the gallery is clipped to it, and queries without a positive are left out: both give a warning.

    Args:
        embeddings: (N, D) points on the manifold, array or tensor.
        labels: (N,) integers or strings.
        gallery: (M, D) points to search instead; needs ``gallery_labels``.
        gallery_labels: (M,).
        manifold: the geometry whose similarity ranks the neighbours; None normalises and takes the cosine.
        metrics: configs or names, e.g. ``["recall@1", "map@r", "ndcg@10", "nmi"]``; all share one search.
            Those that do not search describe ``embeddings`` (nmi, ami, f1, diagnostics), or all pairs (eer, roc_auc).
        ids: (N,) integers or strings that tell the queries apart; only with ``gallery_ids``. All items with the id of a
            query are left out for it, so the ids may also be of groups: cameras, bursts, videos.
        gallery_ids: (M,).
        ties: ``"expected"`` or ``"pessimistic"``.
        group: a torch.distributed process group whose ranks share the queries; each must call with the same arguments.

    Returns:
        Fractions by name, e.g. ``{"recall@1": 0.93, "map@r": 0.61}``.

    Raises:
        ValueError: embeddings that are not finite, off the manifold, or zero where the cosine is taken, lengths that
            differ, an empty gallery, a single class, no query with a positive, an unknown metric or a k below 1.

    Example:
        >>> points = [[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.1, 0.9]]
        >>> retrieval_metrics(points, [0, 0, 1, 1], metrics=["recall@1", "map@r"])
        {'recall@1': 1.0, 'map@r': 1.0}
    """
    scores = score_retrieval(
        embeddings,
        labels,
        gallery,
        gallery_labels,
        manifold,
        metrics,
        ids=ids,
        gallery_ids=gallery_ids,
        ties=ties,
        group=group,
    )
    for note in scores.notes:
        warnings.warn(note, stacklevel=2)
    return scores.values


@torch.no_grad()  # the curvature of a manifold may be learned
def score_retrieval(
    embeddings: Array,
    labels: Array,
    gallery: Array | None = None,
    gallery_labels: Array | None = None,
    manifold: Manifold | None = None,
    metrics: Sequence[MetricConfig | str] = DEFAULT_METRICS,
    *,
    ids: Array | None = None,
    gallery_ids: Array | None = None,
    ties: Ties = "expected",
    group: Any = None,
    advance: Callable[[int], None] = lambda _: None,
) -> Scores:
    """`retrieval_metrics` with the values of each query, its nearest neighbour, and notes instead of warnings.

    Args:
        advance: told how many more queries are ranked; the others are those of `retrieval_metrics`.

    Raises:
        ValueError: see `retrieval_metrics`.
    """
    configs = metric_configs(metrics)
    points = as_embeddings(embeddings, "embeddings")
    items = None if gallery is None else as_embeddings(gallery, "gallery")
    if (gallery is None) != (gallery_labels is None):
        raise ValueError("gallery and gallery_labels: give both or neither")
    if (ids is None) != (gallery_ids is None) or (ids is not None and gallery is None):
        raise ValueError("ids and gallery_ids: give both, with a gallery, or neither")
    lengths = len(points), None if items is None else len(items)
    keys = as_keys(labels, gallery_labels, "labels", lengths)
    if int(max(side.max() if len(side) else 0 for side in keys)) == 0:
        raise ValueError(f"labels: all {len(points)} are of one class; retrieval needs at least two")
    names = _identities(ids, gallery_ids, lengths)
    if manifold is None:
        manifold = default_manifold(points)
        points = as_points(points, manifold, "embeddings")
        items = None if items is None else as_points(items, manifold, "gallery")
    refuse_what_is_no_point(manifold, points, "embeddings")
    if items is not None:
        refuse_what_is_no_point(manifold, items, "gallery")
    targets = None if items is None else Targets(items, keys[1], names[1], keys[0], names[0])
    described = Points(points, keys[0].unique(return_inverse=True)[1].to(points.device), manifold, targets)
    vectors = search_vectors(manifold, points, items)
    search, positives = build_search(vectors, keys if items is not None else (keys[0], keys[0]), names)
    return _score(search, positives, described, configs, ties, group, advance)


def _identities(ids: Array | None, gallery_ids: Array | None, lengths: tuple[int, int | None]) -> tuple[Tensor, Tensor]:
    if ids is not None:
        return as_keys(ids, gallery_ids, "ids", lengths)
    queries = torch.arange(lengths[0])
    return queries, queries if lengths[1] is None else torch.arange(lengths[1]) + lengths[0]


def _score(
    search: Search,
    positives: Tensor,
    points: Points,
    configs: Sequence[MetricConfig],
    ties: Ties,
    group: Any,
    advance: Callable[[int], None],
) -> Scores:
    scored = positives.nonzero()[:, 0]
    if len(scored) == 0:
        raise ValueError("labels: no query has another item of its class to find; nothing to score")
    searching = [config for config in configs if config.searches]
    per_query: dict[str, Tensor] = {}
    nearest = scored[:0]
    notes: tuple[str, ...] = ()
    if searching:
        blocks: list[dict[str, Tensor]] = []
        for ranking, near in rankings(search, share_of(scored, group), searching, ties):
            found = {name: value for config in searching for name, value in config.per_query(ranking).items()}
            blocks.append(found | {_NEAREST: near.double()})
            advance(len(near))
        columns = {name: torch.cat([block[name] for block in blocks]) for name in blocks[0]}
        per_query = {name: gather_interleaved(value, len(scored), group).cpu() for name, value in columns.items()}
        nearest = per_query.pop(_NEAREST).long()
        notes = tuple(_notes(searching, search, positives))
    values = {name: float(value.mean()) for name, value in per_query.items()}
    for config in configs:
        if not config.searches:
            values |= config.of_points(points)
            notes = (*notes, *config.notes(points))
    return Scores(
        values=values,
        definitions={name: config.definition for config in configs for name in config.names()},
        per_query=per_query,
        queries=scored.cpu(),
        nearest=nearest,
        left_out=len(positives) - len(scored),
        notes=notes,
    )


def _notes(configs: Sequence[MetricConfig], search: Search, positives: Tensor) -> Iterator[str]:
    left_out = int((positives == 0).sum())
    if left_out:
        yield f"{left_out} of {len(positives)} queries have no other item of their class to find and are left out"
    smallest = len(search.gallery) - int(search.excluded.count[positives > 0].max())
    yield from clip_notes(configs, smallest)


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


def metric_configs(metrics: Sequence["MetricConfig | str"]) -> list[MetricConfig]:
    """Turn names into configs; configs stay as they are.

    Raises:
        ValueError: no metric, an unknown name, or a k below 1.

    Example:
        >>> from dmlkit.metrics import metric_configs
        >>> metric_configs(["recall@5"])
        [RecallConfig(name='recall', k=(5,))]
    """
    if not metrics:
        raise ValueError("metrics: expected at least one")
    return [_config(metric) if isinstance(metric, str) else metric for metric in metrics]


def _config(text: str) -> MetricConfig:
    name, _, compat = text.partition(":")
    options: dict[str, Any] = {"compat": compat} if compat else {}
    by_key = {variant.key: variant for variant in MetricConfig.variants.values()}
    variant = by_key.get(name) or MetricConfig.variants.get(name)
    head, _, cut = name.partition("@")
    if variant is None and re.fullmatch(r"-?[0-9]+", cut):
        variant = by_key.get(f"{head}@k")
        if len(cut) > 18:
            raise ValueError(f"metrics: {text[:30]!r}: k must fit into 64 bits")
        if int(cut) < 1:
            raise ValueError(f"metrics: {text!r}: k must be at least 1, got {cut}")
        options["k"] = (int(cut),)
    option, is_option, value = cut.partition("=")
    if variant is None and is_option:
        variant = by_key.get(f"{head}@{option}=x")
        try:
            options[option] = (float(value),)
        except ValueError:
            raise ValueError(f"metrics: {text[:50]!r}: expected a number after '='") from None
    if variant is None:
        raise ValueError(f"metrics: {text!r} is unknown; expected one of {', '.join(sorted(by_key))}")
    try:
        return variant(**options)
    except ValidationError as error:
        first = error.errors()[0]
        if first["type"] == "missing":
            raise ValueError(f"metrics: {text!r}: expected {variant.key}, with a number for x") from None
        raise ValueError(f"metrics: {text!r}: {first['msg']}") from None


def share_of(rows: Tensor, group: Any) -> Tensor:
    """Return every world-size-th row, starting at this rank; all rows without a group."""
    return rows if group is None else rows[dist.get_rank(group) :: dist.get_world_size(group)]


def gather_interleaved(values: Tensor, total: int, group: Any) -> Tensor:
    """Gather values (n,) of each rank's rows in the order before `share_of`: (total,), equal on all ranks."""
    if group is None:
        return values
    world = dist.get_world_size(group)
    padded = values.new_zeros(-(-total // world))
    padded[: len(values)] = values
    shares = [torch.empty_like(padded) for _ in range(world)]
    dist.all_gather(shares, padded, group=group)
    return torch.stack(shares, 1).flatten()[:total]
