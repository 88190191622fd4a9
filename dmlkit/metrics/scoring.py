"""Computation of metrics by name from embeddings and labels, or from hits that were ranked elsewhere."""

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch import Tensor
from torch.nn.functional import cosine_similarity

from dmlkit.errors import require_list
from dmlkit.manifolds.base import Manifold
from dmlkit.manifolds.sphere import Sphere
from dmlkit.metrics.base import Array, Labeled, Labels, MetricConfig, Points, Ranking, Targets
from dmlkit.metrics.ranking.labels import Labeling, check_sides, identities
from dmlkit.metrics.ranking.rankings import (
    Ties,
    as_directions,
    as_sides,
    build_search,
    rankings,
    require_points,
    search_vectors,
)
from dmlkit.metrics.ranking.rerank import ExpandedGallery, Expansion, KReciprocal, ReciprocalGallery, Rerank
from dmlkit.metrics.ranking.search import Search
from dmlkit.metrics.ranking.single_shot import single_shot
from dmlkit.metrics.retrieval import CmcConfig
from dmlkit.nearest.rescore import Rescorer, rescored_rows

_NEAREST = "nearest"
DEFAULT_METRICS = ("recall@1", "r_precision", "map@r")


@dataclass(frozen=True)
class Scores:
    """Metrics, and the values of each query."""

    values: dict[str, float]  # by name of the metric, as the next two
    definitions: dict[str, str]  # in one line
    per_query: dict[str, Tensor]  # (Q',) float64, for the metrics that are means over queries
    queries: Tensor  # (Q',) int64, the scored queries, which have a positive
    nearest: Tensor  # (Q',) int64, the gallery item nearest to each scored query
    left_out: int  # number of queries without a positive
    notes: tuple[str, ...]  # for the reader: clipped cut-offs, queries left out


def retrieval_metrics(
    embeddings: Array,
    labels: Labels,
    gallery: Array | None = None,
    gallery_labels: Labels | None = None,
    manifold: Manifold | None = None,
    metrics: Sequence[MetricConfig | str] = DEFAULT_METRICS,
    *,
    ids: tuple[Array, Array] | None = None,
    ties: Ties = "expected",
) -> dict[str, float]:
    """Score embeddings by searching each one among all the others, or among a gallery.

    - A query is never its own neighbor: without a gallery it is excluded by its position, with a gallery and ids by
      its id; its duplicates are not excluded. With a gallery and no ids nothing is excluded (In-Shop).
    - Metrics are expected values over the orders of items of the same score, ``map@k:oml`` the ratio of two;
      ``ties="pessimistic"`` ranks positives last among them. Equal gallery vectors always tie; other scores tie if they
      are equal in floating point.
    - A k larger than the gallery is clipped, and queries without a positive are left out: both give a warning.

    Args:
        embeddings: (N, D) points on the manifold, array or tensor.
        labels: (N,) integers or strings; with a hierarchy a mapping from each level to them, coarsest first, e.g.
            ``{"genus": [...], "species": [...]}``, for metrics such as ``recall@1:genus`` and ``h_ap``; or (N, L) bool,
            which of L labels each embedding has: items that share one are then positives.
        gallery: (M, D) points to search instead; needs ``gallery_labels``.
        gallery_labels: (M,) integers or strings, or a mapping with the same levels, or (M, L) bool.
        manifold: the geometry whose similarity ranks the neighbors; None normalizes the rows and uses the cosine.
        metrics: configs or names, e.g. ``["recall@1", "map@r", "ndcg@10", "nmi"]``; all share one search.
            Metrics that do not search describe ``embeddings`` (nmi, ami, f1, spread) or all pairs (eer, roc_auc).
        ids: (N,) and (M,) integers or strings that identify the embeddings and those of the gallery. All items with
            the id of a query are excluded for it, so ids may also identify groups such as cameras, bursts or videos.
        ties: ``"expected"`` or ``"pessimistic"``.

    Returns:
        Fractions by name, e.g. ``{"recall@1": 0.93, "map@r": 0.61}``.

    Raises:
        ValueError: embeddings are not finite, not on the manifold, or zero and compared by the cosine; lengths differ;
            the gallery is empty; there is a single class or no query with a positive; a metric or ``ties`` is unknown;
            or a k is below 1.

    Example:
        >>> points = [[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.1, 0.9]]
        >>> retrieval_metrics(points, [0, 0, 1, 1], metrics=["recall@1", "map@r"])
        {'recall@1': 1.0, 'map@r': 1.0}
    """
    if (gallery is None) != (gallery_labels is None):
        raise ValueError("gallery and gallery_labels: give both or neither")
    if ids is not None and (gallery is None or len(ids) != 2):
        raise ValueError("ids: expected a pair, the ids of the embeddings and those of the gallery, which it needs")
    query_ids, gallery_ids = (None, None) if ids is None else ids
    items = None if gallery is None or gallery_labels is None else Labeled(gallery, gallery_labels, gallery_ids)
    scores = score_retrieval(Labeled(embeddings, labels, query_ids), items, manifold, metrics, ties=ties)
    for note in scores.notes:
        warnings.warn(note, stacklevel=2)
    return scores.values


@torch.no_grad()  # the curvature of a manifold may be learned
def score_retrieval(
    queries: Labeled,
    gallery: Labeled | None = None,
    manifold: Manifold | None = None,
    metrics: Sequence[MetricConfig | str] = DEFAULT_METRICS,
    *,
    ties: Ties = "expected",
    rerank: Rerank | Rescorer | None = None,
    group: Any = None,
    advance: Callable[[int], None] = lambda _: None,
) -> Scores:
    """Compute `retrieval_metrics` with the values and nearest neighbor of each query, and notes instead of warnings.

    Args:
        queries: the embeddings; each one is searched among all the others, or in the gallery.
        rerank: another order of the items, on the CPU: a method of re-ranking, or a second similarity of the rows of
            queries and of the gallery. Metrics that do not search are those of the points given.
        group: a torch.distributed process group whose ranks share the queries; all must pass the same arguments.
        advance: receives how many more queries are ranked.

    Raises:
        TypeError: the queries or the gallery are no `Labeled`.
        ValueError: see `retrieval_metrics`.

    Example:
        >>> scores = score_retrieval(Labeled([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]], [0, 1, 1]), metrics=["recall@1"])
        >>> scores.values, scores.nearest.tolist()
        ({'recall@1': 1.0}, [2, 1])
    """
    check_sides(queries, gallery)
    if ties not in get_args(Ties):
        raise ValueError(f"ties: got {ties!r}, expected one of {', '.join(get_args(Ties))}")
    configs = metric_configs(metrics)
    points, items = as_sides(queries.embeddings, gallery and gallery.embeddings)
    lengths = len(points), None if items is None else len(items)
    ids = identities(queries, gallery, lengths)
    labeling = Labeling.of(queries.labels, gallery and gallery.labels, lengths).needed(configs)
    keys = labeling.classes
    if int(max(side.max() if len(side) else 0 for side in keys)) == 0:
        raise ValueError(f"labels: all {len(points)} embeddings are of one class; retrieval needs at least two")
    if manifold is None:
        manifold = Sphere(points.shape[1])
        points = as_directions(points, "embeddings")
        items = None if items is None else as_directions(items, "gallery")
    require_points(manifold, points, "embeddings")
    if items is not None:
        require_points(manifold, items, "gallery")
    targets = None if items is None else Targets(items, keys[1], ids[1], keys[0], ids[0])
    described = Points(points, keys[0].unique(return_inverse=True)[1].to(points.device), manifold, targets)
    if rerank is not None:
        manifold, points, items = deepcopy(manifold).cpu(), points.cpu(), None if items is None else items.cpu()
    is_among = items is None or torch.equal(points, items)  # each image is a query and in the gallery
    others = points if items is None else items
    if isinstance(rerank, Expansion):
        expanded = ExpandedGallery(manifold, others, rerank)
        points = expanded.points if is_among else expanded.expanded(points)
        items = None if items is None else expanded.points
    vectors = search_vectors(manifold, points, items)
    sides = keys if items is not None else (keys[0], keys[0])
    search, positives = build_search(vectors, sides, ids, labeling.members)
    if isinstance(rerank, KReciprocal):
        reranked, query_points = ReciprocalGallery(manifold, others, rerank), points

        def rows(block: Tensor) -> Tensor:
            return reranked.own_scores(block) if is_among else reranked.scores(query_points[block])

        search = replace(search, rows=rows)
    elif isinstance(rerank, Rescorer):
        search = replace(search, rows=rescored_rows(rerank, manifold, points, others))
    return _score(labeling.in_search(search), positives, described, labeling, configs, ties, group, advance)


def _score(
    search: Search,
    positives: Tensor,
    points: Points,
    labeling: Labeling,
    configs: Sequence[MetricConfig],
    ties: Ties,
    group: Any,
    advance: Callable[[int], None],
) -> Scores:
    scored = positives.nonzero()[:, 0]
    if len(scored) == 0:
        raise ValueError("labels: no query has another item of its class to find, so there is nothing to score")
    searching = [config for config in configs if config.searches]
    per_query: dict[str, Tensor] = {}
    nearest = scored[:0]
    notes: tuple[str, ...] = ()
    if searching:
        blocks: list[dict[str, Tensor]] = []
        mine = scored if group is None else _share(scored, dist.get_rank(group), dist.get_world_size(group))
        start = 0
        shots = max(
            (max(config.k) for config in searching if isinstance(config, CmcConfig) and config.compat), default=0
        )
        single = None
        if shots and labeling.members is None:
            single = single_shot(search, labeling.classes, mine, shots, is_pessimistic=ties == "pessimistic")
        for ranking, nearest_items in rankings(search, mine, searching, ties):
            block_values: dict[str, Tensor] = {}
            if single is not None:
                ranking = replace(ranking, single_shot=single[start : start + len(nearest_items)])
                start += len(nearest_items)
            for config in searching:
                block_values |= config.named(config.per_query(labeling.ranking(config, ranking)))
            blocks.append(block_values | {_NEAREST: nearest_items.double()})
            advance(len(nearest_items))
        columns = {name: torch.cat([block[name] for block in blocks]) for name in blocks[0]}
        per_query = {name: gather_interleaved(value, len(scored), group).cpu() for name, value in columns.items()}
        nearest = per_query.pop(_NEAREST).long()
        notes = (*_notes(searching, search, positives), *_collapse(search, labeling), *labeling.notes(configs))
    values = {name: float(value.mean()) for name, value in per_query.items()}
    for config in configs:
        if not config.searches:
            level_points = labeling.points(config, points)
            values |= config.named(config.of_points(level_points))
            notes = (*notes, *config.notes(level_points))
    return Scores(
        values=values,
        definitions={name: config.definition for config in configs for name in config.names()},
        per_query=per_query,
        queries=scored.cpu(),
        nearest=nearest,
        left_out=len(positives) - len(scored),
        notes=notes,
    )


def _share(queries: Tensor, rank: int, ranks: int) -> Tensor:
    """Return the queries that a rank scores; one without any scores the last too, which `gather_interleaved` drops."""
    return queries[min(rank, len(queries) - 1) :: ranks]


def gather_interleaved(values: Tensor, total: int, group: Any) -> Tensor:
    """Gather values (n,) of each rank's rows in the order in which they were dealt: (total,), equal on all ranks."""
    if group is None:
        return values
    world = dist.get_world_size(group)
    padded = values.new_zeros(-(-total // world))
    padded[: len(values)] = values
    shares = [torch.empty_like(padded) for _ in range(world)]
    dist.all_gather(shares, padded, group=group)
    return torch.stack(shares, 1).flatten()[:total]


def _notes(configs: Sequence[MetricConfig], search: Search, positives: Tensor) -> Iterator[str]:
    left_out = int((positives == 0).sum())
    if left_out:
        yield f"{left_out} of {len(positives)} queries are left out, because no other item of their class is ranked"
    smallest = len(search.gallery) - int(search.excluded.count[positives > 0].max())
    yield from clip_notes(configs, smallest)


PAIRS = 4096  # drawn to see how near embeddings of different classes are
COLLAPSED = 0.9999  # glyphs at a median cosine of 0.9999994: ties in float32 turn a recall@1 of 0.340 into 0.376


def _collapse(search: Search, labeling: Labeling) -> Iterator[str]:
    """Yield a note if embeddings of different classes are so near that float32 does not distinguish their cosines."""
    if search.gallery.dtype != torch.float32:
        return
    queries, items = labeling.classes
    items, members = items if len(items) else queries, labeling.members
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randint(len(side), (PAIRS,), generator=generator) for side in (queries, items))
    one, other = queries[first], items[second]
    unlike = one != other if members is None else ~(members[one] & members[other]).any(1)
    x, y = search.queries[first[unlike]].double(), search.gallery[second[unlike]].double()
    median = float(cosine_similarity(x, y).median())
    if median > COLLAPSED:
        yield (
            f"the median cosine of embeddings of different classes is {median:.7f}: they have collapsed, and the "
            "metrics count what float32 cannot order as ties"
        )


def metrics_from_hits(hits: Array, positives: Array, metrics: Sequence[MetricConfig | str]) -> dict[str, float]:
    """Compute metrics from hits that were ranked elsewhere.

    Args:
        hits: (N, K) bool or 0/1; whether neighbor k of query n, nearest first and without n itself, is a positive.
        positives: (N,) integers >= 0; R, the number of positives in the gallery. Queries with 0 are left out.
        metrics: search metrics, as configs or names, without a level.

    Returns:
        Fractions by name. A k larger than K is clipped, and MRR is 0 for a query without a hit: both give a warning.

    Raises:
        ValueError: shapes are wrong; a query has more hits than positives; a metric does not search or is of a level;
            a metric needs the first R items and a list ends before R; or it needs all positives and a list lacks some.

    Example:
        >>> metrics_from_hits([[1, 0, 1, 0]], [2], ["precision@1", "map@4"])
        {'precision@1': 1.0, 'map@4': 0.8333333333333333}
    """
    configs = metric_configs(metrics)
    for config in configs:
        if not config.searches:
            raise ValueError(f"{config.key} is computed from embeddings, not from hits; remove it")
        if config.level is not None:
            raise ValueError(f"{config.names()[0]}: hits have no levels; remove level {config.level}")
    is_hit, counts = torch.as_tensor(hits), torch.as_tensor(positives)
    check_hits(is_hit, counts)
    is_hit, left_out = is_hit[counts > 0].bool(), int((counts == 0).sum())
    depth, width = is_hit.shape[1], max(1, int(is_hit.sum(1).max()))
    index = torch.arange(depth, device=is_hit.device).expand_as(is_hit)
    above = index.masked_fill(~is_hit, depth).sort(1).values[:, :width]  # without ties; one that is not listed is last
    ones, column = torch.ones_like(above), torch.arange(width, device=is_hit.device).expand_as(above)
    listed = counts[counts > 0]
    ranking = Ranking(above, ones, column, ones, listed.long(), torch.full_like(listed, depth, dtype=torch.int64))
    lacks_some = is_hit.sum(1) < ranking.positives
    short = (ranking.positives > is_hit.shape[1]) & lacks_some
    for config in configs:
        if config.to_r and short.any():
            raise ValueError(
                f"hits: {config.key} needs the first R items, but {int(short.sum())} lists of {is_hit.shape[1]} items "
                "end before R"
            )
        if config.to_end and lacks_some.any():
            raise ValueError(
                f"hits: {config.key} needs all positives, but {int(lacks_some.sum())} lists of {is_hit.shape[1]} items "
                "lack some; rank the whole gallery, or use e.g. map@k"
            )
    if left_out:
        warnings.warn(f"{left_out} of {len(counts)} queries have no positive and are left out", stacklevel=2)
    if any(config.key == "mrr" for config in configs) and not is_hit.any(1).all():
        warnings.warn(f"mrr is 0 for the {int((~is_hit.any(1)).sum())} queries without a listed hit", stacklevel=2)
    for note in clip_notes(configs, is_hit.shape[1]):
        warnings.warn(note, stacklevel=2)
    values = [config.named(config.per_query(ranking)) for config in configs]
    return {name: float(value.mean()) for by_name in values for name, value in by_name.items()}


def check_hits(hits: Tensor, positives: Tensor) -> None:
    """Check that hits and positives are consistent."""
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
        raise ValueError("positives: no query has any, so there is nothing to score")


def clip_notes(configs: Sequence[MetricConfig], gallery: int) -> Iterator[str]:
    """Yield a note for each cut-off that is larger than a gallery of ``gallery`` items.

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
    """Convert names of metrics to configs; configs are returned unchanged.

    Raises:
        ValueError: there is no metric, a name is unknown, or a k is below 1.

    Example:
        >>> from dmlkit.metrics import metric_configs
        >>> metric_configs(["recall@5"])
        [RecallConfig(name='recall', k=(5,))]
    """
    require_list("metrics", metrics)
    if not metrics:
        raise ValueError("expected at least one metric")
    return [_config(metric) if isinstance(metric, str) else metric for metric in metrics]


def _config(text: str) -> MetricConfig:
    name, *suffixes = text.split(":")
    options: dict[str, Any] = {}
    by_key = {variant.key: variant for variant in MetricConfig.variants.values()}
    variant = by_key.get(name) or MetricConfig.variants.get(name)
    head, _, cut = name.partition("@")
    if variant is None and re.fullmatch(r"-?[0-9]+", cut):
        variant = by_key.get(f"{head}@k")
        if len(cut) > 18:
            raise ValueError(f"{text[:30]!r}: k must fit into 64 bits")
        if int(cut) < 1:
            raise ValueError(f"{text!r}: k must be at least 1, got {cut}")
        options["k"] = (int(cut),)
    option, is_option, value = cut.partition("=")
    if variant is None and is_option:
        variant = by_key.get(f"{head}@{option}=x")
        try:
            options[option] = (float(value),)
        except ValueError:
            raise ValueError(f"{text[:50]!r}: expected a number after '='") from None
    if variant is None:
        raise ValueError(f"unknown metric {text!r}; expected one of {', '.join(sorted(by_key))}")
    kinds = ["compat" if suffix in variant.compat_values() else "level" for suffix in suffixes]
    if len(set(kinds)) < len(kinds):
        raise ValueError(f"{text!r}: expected at most one library and one level after the name, e.g. map@10:oml:genus")
    options |= dict(zip(kinds, suffixes, strict=True))
    try:
        return variant(**options)
    except ValidationError as error:
        first = error.errors()[0]
        if first["type"] == "missing":
            raise ValueError(f"{text!r}: expected {variant.key}, with a number for x") from None
        raise ValueError(f"{text!r}: {first['msg']}") from None
