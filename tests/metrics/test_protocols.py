"""Several labels per item, junk of the query's own camera, and single-shot galleries, against loops."""

from itertools import product

import numpy as np
import pytest
import torch

from dmlkit.manifolds import Euclidean
from dmlkit.metrics import Labeled, metrics_from_hits, retrieval_metrics, score_retrieval
from dmlkit.metrics.ranking import gpu_search, rankings, single_shot
from dmlkit.nearest.rescore import Rescorer
from tests.metrics.naive import expected

NAMES = {"recall@1": ("recall", 1), "recall@3": ("recall", 3), "map@r": ("map@r", 1), "ndcg@5": ("ndcg", 5)}


def random_items(seed: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Points on a coarse grid, so that some tie, and one to three of six labels each."""
    generator = torch.Generator().manual_seed(seed)
    points = torch.randint(4, (count, 2), generator=generator).float()
    matrix = torch.rand(count, 6, generator=generator) < 0.2
    matrix[torch.arange(count), torch.randint(6, (count,), generator=generator)] = True
    return points, matrix


def naive(points, matrix, items, labels, hidden) -> dict[str, float]:
    values: dict[str, list[float]] = {name: [] for name in NAMES}
    for q in range(len(points)):
        kept = [j for j in range(len(items)) if not hidden(q, j)]
        hits = [
            bool({*matrix[q].nonzero().flatten().tolist()} & {*labels[j].nonzero().flatten().tolist()}) for j in kept
        ]
        scores = [-float((points[q] - items[j]).norm()) for j in kept]
        if any(hits):
            for name, (metric, k) in NAMES.items():
                values[name].append(expected(scores, hits, metric, k))
    return {name: sum(of_queries) / len(of_queries) for name, of_queries in values.items()}


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_equals_loops_over_sets_of_labels(backend: str, monkeypatch: pytest.MonkeyPatch):
    if backend == "gpu":  # its code also runs on a CPU
        monkeypatch.setattr(rankings, "cpu_search", gpu_search)
    points, matrix = random_items(0, 12)
    figures = retrieval_metrics(points, matrix, manifold=Euclidean(2), metrics=list(NAMES))
    assert figures == pytest.approx(naive(points, matrix, points, matrix, lambda q, j: q == j), abs=1e-9)
    items, labels = random_items(1, 9)
    groups, others = np.arange(12) % 4, np.arange(9) % 5
    figures = retrieval_metrics(points, matrix, items, labels.numpy(), Euclidean(2), list(NAMES), ids=(groups, others))
    hidden = lambda q, j: groups[q] == others[j]  # noqa: E731
    assert figures == pytest.approx(naive(points, matrix, items, labels, hidden), abs=1e-9)


@pytest.mark.parametrize(
    ("matrix", "gallery", "metrics", "said"),
    [
        (torch.tensor([[True, False], [False, False]]), None, ["map@r"], "labels: row 1 has no label; expected at"),
        (torch.ones(3, 2).bool(), None, ["map@r"], r"labels: expected one row per embedding, \(2, L\), got \(3, 2\)"),
        (torch.eye(2).bool(), torch.eye(3).bool()[:2], ["map@r"], "with the same L labels"),
        (torch.eye(2).bool(), [0, 1], ["map@r"], "with the same L labels"),
        (torch.eye(2).bool(), None, ["nmi"], "nmi: needs one label per embedding, got several"),
    ],
)
def test_what_is_wrong_with_a_matrix_is_named(matrix, gallery, metrics, said):
    points = torch.eye(2)
    with pytest.raises(ValueError, match=said):
        retrieval_metrics(points, matrix, None if gallery is None else points, gallery, metrics=metrics)


RANKS = (1, 5, 10)


def market(scores: np.ndarray, people: list[np.ndarray], cameras: list[np.ndarray]) -> tuple[dict[str, float], int]:
    """Compute CMC and mAP as torchreid and fast-reid define them for Market-1501, and count the queries left out.

    Items of the query's person and camera are discarded; a query without any other item of its person is not scored.
    """
    found, precisions = {k: list[bool]() for k in RANKS}, list[float]()
    for row, person, camera in zip(scores, people[0], cameras[0], strict=True):
        nearest_first = sorted(range(len(row)), key=lambda item: -row[item])
        kept = [item for item in nearest_first if (people[1][item], cameras[1][item]) != (person, camera)]
        places = [place for place, item in enumerate(kept, 1) if people[1][item] == person]
        if places:
            precisions.append(sum(count / place for count, place in enumerate(places, 1)) / len(places))
            for k in RANKS:
                found[k].append(places[0] <= k)
    values = {f"cmc@{k}": float(np.mean(hits)) for k, hits in found.items()}
    return {**values, "map": float(np.mean(precisions))}, len(scores) - len(precisions)


def test_200_problems_with_junk_by_the_rule_of_market():
    """Some queries have junk alone, some cameras see one person, and the gallery has people who are never queried."""
    junk_alone = 0
    for seed in range(200):
        random = np.random.default_rng(seed)
        sizes, dim = random.integers(5, 60, 2) * (1, 3), int(random.integers(2, 33))
        people = [random.integers(0, high, size) for high, size in zip((12, 15), sizes, strict=True)]
        cameras = [random.integers(0, random.integers(2, 7), size) for size in sizes]
        points = [random.normal(size=(size, dim)) for size in sizes]
        x, y = (side / np.linalg.norm(side, axis=1, keepdims=True) for side in points)
        expected, left_out = market(x @ y.T, people, cameras)
        groups = [person * 10 + camera for person, camera in zip(people, cameras, strict=True)]
        sides = [Labeled(side, *of_side) for side, *of_side in zip((x, y), people, groups, strict=True)]
        scores = score_retrieval(*sides, metrics=list(expected))
        assert scores.values == pytest.approx(expected, abs=1e-9), seed
        assert scores.left_out == left_out, seed
        junk_alone += left_out
    assert junk_alone > 60


METRICS = ["cmc@1:cuhk03", "cmc@2:cuhk03", "cmc@3:cuhk03", "map"]


def over_all_draws(queries: Labeled, gallery: Labeled, k: int, ties: str) -> list[float]:
    """Values of the queries: mean over every choice of one item per class, as torchreid's `eval_cuhk03` draws some."""
    x, y = (np.asarray(side.embeddings) for side in (queries, gallery))
    values: list[float] = []
    for query, label, own in zip(x, queries.labels, queries.ids, strict=True):
        scores = y @ query
        of_class: dict[int, list[int]] = {}
        for item in range(len(y)):
            if gallery.ids[item] != own:
                of_class.setdefault(int(gallery.labels[item]), []).append(item)
        if int(label) not in of_class:
            continue
        hits: list[float] = []
        for draw in product(*of_class.values()):
            (hit,) = (item for item in draw if gallery.labels[item] == label)
            above = sum(scores[item] > scores[hit] for item in draw)
            tied = sum(scores[item] == scores[hit] for item in draw)
            places = range(above + 1, above + tied + 1) if ties == "expected" else [above + tied]
            hits.append(float(np.mean([place <= k for place in places])))
        values.append(float(np.mean(hits)))
    return values


def sides(seed: int, *, has_ties: bool) -> tuple[Labeled, Labeled]:
    random = np.random.default_rng(seed)
    corners = np.array([[3, 4], [4, 3], [-3, 4], [5, 0]]) / 5  # few directions, so that many scores are equal
    points = [
        corners[random.integers(0, 4, count)] if has_ties else random.normal(size=(count, 2)) for count in (8, 13)
    ]
    x, y = (point / np.linalg.norm(point, axis=1, keepdims=True) for point in points)
    labels = random.integers(0, 5, 8), np.concatenate([np.arange(5), random.integers(0, 5, 8)])
    cameras = random.integers(0, 4, 8), random.integers(0, 4, 13)
    return Labeled(x, labels[0], cameras[0]), Labeled(y, labels[1], cameras[1])


@pytest.mark.parametrize("ties", ["expected", "pessimistic"])
@pytest.mark.parametrize("has_ties", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_against_all_draws(seed, has_ties, ties, monkeypatch):
    monkeypatch.setattr(single_shot, "BLOCK_ENTRIES", 3 * 13)  # blocks of 3 queries or fewer
    queries, gallery = sides(seed, has_ties=has_ties)
    scores = score_retrieval(queries, gallery, metrics=METRICS, ties=ties)
    for k in (1, 2, 3):
        expected = over_all_draws(queries, gallery, k, ties)
        np.testing.assert_allclose(scores.per_query[f"cmc@{k}:cuhk03"], expected, atol=1e-12)
    classes = len(np.unique(gallery.labels))
    assert retrieval_metrics(
        *(queries.embeddings, queries.labels, gallery.embeddings, gallery.labels),
        ids=(queries.ids, gallery.ids),
        metrics=[f"cmc@{classes}:cuhk03"],
    ) == pytest.approx({f"cmc@{classes}:cuhk03": 1})


def test_each_among_all_others_and_with_a_hierarchy():
    points, labels = sides(5, has_ties=False)[1].embeddings, np.arange(13) % 4
    expected = np.mean(over_all_draws(*[Labeled(points, labels, np.arange(13))] * 2, 2, "expected"))
    plain = score_retrieval(Labeled(points, labels), metrics=["cmc@2:cuhk03"])
    assert plain.values["cmc@2:cuhk03"] == pytest.approx(expected, abs=1e-12)
    levels = {"family": labels % 2, "species": labels}
    deep = score_retrieval(Labeled(points, levels), metrics=["cmc@2:cuhk03", "h_ap", "recall@1:family"])
    assert deep.values["cmc@2:cuhk03"] == pytest.approx(expected, abs=1e-12)


def test_what_it_does_not_apply_to():
    with pytest.raises(ValueError, match="draws an image of each class; remove level family"):
        score_retrieval(
            Labeled(torch.eye(4), {"family": [0, 0, 1, 1], "kind": [0, 0, 1, 1]}), metrics=["cmc@1:cuhk03:family"]
        )
    with pytest.raises(ValueError, match="cmc@1:cuhk03: draws images of a gallery with one label each"):
        metrics_from_hits([[1, 0]], [1], ["cmc@1:cuhk03"])
    members = np.array([[1, 0], [1, 1], [0, 1], [0, 1]], dtype=bool)
    with pytest.raises(ValueError, match="one label each; remove the metric"):
        score_retrieval(Labeled(torch.eye(4), members), metrics=["cmc@1:cuhk03"])


def test_equal_points_that_a_second_similarity_tells_apart_are_ranked_by_it():
    """The query's own item is a copy of another one; by the points alone they tie."""
    query, gallery = Labeled([[1.0, 0.0]], [0]), Labeled([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]], [1, 0, 2])
    second = Rescorer(lambda queries, items: (items == 1).double(), share=0.5, most=3)
    for rerank, value in ((None, 0.5), (second, 1.0)):
        scores = score_retrieval(query, gallery, metrics=["cmc@1:cuhk03"], rerank=rerank)
        assert scores.values["cmc@1:cuhk03"] == pytest.approx(value, abs=1e-12)
