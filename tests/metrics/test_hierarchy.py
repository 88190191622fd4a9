"""Graded metrics and metrics of one level against loops from their definitions, ties by trying every order."""

from itertools import permutations
from math import log2

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dmlkit.manifolds import Euclidean
from dmlkit.metrics import HierarchicalApConfig, Labeled, MetricConfig, retrieval_metrics, score_retrieval
from dmlkit.metrics.ranking import cpu_search, rankings
from tests.metrics.naive import at_rank

LEVELS = 3
NAMES = ("family", "genus", "species")


def h_ap(grades: list[int], alpha: float = 1.0) -> float:
    """Equations 2 to 4 of Ramzi et al. for a list of shared levels, nearest first."""
    relevance = [(grade / LEVELS) ** alpha / grades.count(grade) for grade in grades]
    total = 0.0
    for k, grade in enumerate(grades):
        if grade:
            h_rank = relevance[k] + sum(min(relevance[j], relevance[k]) for j in range(k) if grades[j])
            total += h_rank / (k + 1)
    return total / sum(relevance)


def graded_ndcg(grades: list[int], k: int) -> float:
    def gain(order: list[int]) -> float:
        return sum((2**grade - 1) / log2(place + 2) for place, grade in enumerate(order[:k]))

    return gain(grades) / gain(sorted(grades, reverse=True))


def orders(scores: list[float], grades: list[int], ties: str) -> list[list[int]]:
    """Every list of grades that sorts the scores; the single worst one for pessimistic ties."""
    groups = [
        [g for s, g in zip(scores, grades, strict=True) if s == level] for level in sorted(set(scores), reverse=True)
    ]
    found: list[list[int]] = [[]]
    for group in groups:
        ways = [sorted(group)] if ties == "pessimistic" else list(permutations(group))
        found = [before + list(way) for before in found for way in ways]
    return found


METRICS = {
    "h_ap": lambda order: h_ap(order),
    "graded_ndcg@2": lambda order: graded_ndcg(order, 2),
    "graded_ndcg@50": lambda order: graded_ndcg(order, 50),
    "recall@1": lambda order: at_rank([g == 3 for g in order], order.count(3), "recall", 1),
    "map@r": lambda order: at_rank([g == 3 for g in order], order.count(3), "map@r", 1),
    "mrr:genus": lambda order: at_rank([int(g >= 2) for g in order], sum(g >= 2 for g in order), "mrr", 1),
    "map@r:genus": lambda order: at_rank([g >= 2 for g in order], sum(g >= 2 for g in order), "map@r", 1),
    "recall@1:family": lambda order: at_rank([g >= 1 for g in order], sum(g >= 1 for g in order), "recall", 1),
    "r_precision:family": lambda order: at_rank([g >= 1 for g in order], sum(g >= 1 for g in order), "r_precision", 1),
}


def naive(points, paths, ties, gallery=None, gallery_paths=None):
    """Means over the queries that have another image of their class, on points of a line."""
    among = gallery is None
    gallery, gallery_paths = (points, paths) if gallery is None else (gallery, gallery_paths)
    values = {name: [] for name in METRICS}
    for q, (x, path) in enumerate(zip(points, paths, strict=True)):
        kept = [g for g in range(len(gallery)) if not (among and g == q)]
        grades = [shared(path, gallery_paths[g]) for g in kept]
        if LEVELS in grades:
            lists = orders([-abs(float(x) - float(gallery[g])) for g in kept], grades, ties)
            for name, metric in METRICS.items():
                values[name].append(np.mean([metric(order) for order in lists]))
    return {name: np.mean(column) for name, column in values.items() if column}


def shared(path: str, other: str) -> int:
    one, two = path.split("/"), other.split("/")
    return next((place for place in range(LEVELS) if one[place] != two[place]), LEVELS)


def by_level(paths: list[str]) -> dict[str, list[str]]:
    return {name: ["/".join(path.split("/")[: depth + 1]) for path in paths] for depth, name in enumerate(NAMES)}


PATHS = ["a/a/a", "a/a/b", "a/b/a", "b/a/a", "b/b/a", "b/b/b"]
items = st.lists(st.tuples(st.integers(-2, 2), st.sampled_from(PATHS)), min_size=3, max_size=6)


@settings(deadline=None, max_examples=40)
@given(items, st.sampled_from(["expected", "pessimistic"]))
def test_metrics_of_a_hierarchy_are_their_definitions(drawn, ties):
    points, paths = [float(x) for x, _ in drawn], [path for _, path in drawn]
    expected = naive(points, paths, ties)
    if len(set(paths)) == 1 or not expected:
        return
    scored = score_retrieval(
        Labeled([[x] for x in points], by_level(paths)), manifold=Euclidean(1), metrics=list(METRICS), ties=ties
    )
    assert scored.values == pytest.approx(expected, abs=1e-12)
    assert any("of one family" in note for note in scored.notes) == (len({path[0] for path in paths}) == 1)


@pytest.mark.parametrize("with_gallery", [False, True])
def test_large_random_hierarchies(with_gallery: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cpu_search, "BLOCK_ROWS", 7)
    monkeypatch.setattr(rankings, "BLOCK_QUERIES", 20)
    rng = np.random.default_rng(int(with_gallery))
    points = rng.permutation(500)[:90].astype(np.float32)  # integers without ties, mostly
    points += np.arange(90, dtype=np.float32) * 1e-3
    paths = [f"{a}/{b}/{c}" for a, b, c in rng.integers(0, 3, (90, 3)).tolist()]
    sides = [(points[:40], paths[:40]), (points[40:], paths[40:])] if with_gallery else [(points, paths)]
    labeled = [Labeled(x[:, None], by_level(names)) for x, names in sides]
    found = score_retrieval(*labeled, manifold=Euclidean(1), metrics=list(METRICS)).values
    expected = naive(*sides[0], "expected", *(sides[1] if with_gallery else (None, None)))
    assert found == pytest.approx(expected, abs=1e-12)


def test_alpha_is_the_exponent_of_the_relevance():
    rng = np.random.default_rng(3)
    points = rng.permutation(40).astype(float) + np.arange(40) * 1e-3
    paths = [f"{a}/{b}/{c}" for a, b, c in rng.integers(0, 2, (40, 3)).tolist()]
    grades = [[shared(paths[0], paths[g]) for g in np.argsort(abs(points - points[0]))[1:]]]
    metric = HierarchicalApConfig(alpha=2.5)
    scores = score_retrieval(Labeled(points[:, None], by_level(paths)), manifold=Euclidean(1), metrics=[metric])
    assert scores.per_query["h_ap"][0].item() == pytest.approx(h_ap(grades[0], 2.5), abs=1e-12)


def test_one_level_gives_the_plain_metrics():
    points, labels = torch.randn(40, 4), (torch.arange(40) % 5).tolist()
    plain = retrieval_metrics(points, labels, metrics=["h_ap", "graded_ndcg@7", "ndcg@7", "map@39"])
    assert plain["h_ap"] == pytest.approx(plain["map@39"], abs=1e-12)
    assert plain["graded_ndcg@7"] == pytest.approx(plain["ndcg@7"], abs=1e-12)
    assert retrieval_metrics(points, {"class": labels}, metrics=["h_ap"])["h_ap"] == pytest.approx(plain["h_ap"])


def test_metrics_of_points_are_those_of_the_level():
    points = torch.randn(60, 4)
    species = torch.arange(60) % 6
    labels = {"genus": species // 2, "species": species}
    figures = retrieval_metrics(points, labels, metrics=["nmi:genus", "eer:genus", "eer"])
    alone = retrieval_metrics(points, species // 2, metrics=["nmi", "eer"])
    assert figures["nmi:genus"] == alone["nmi"]
    assert figures["eer:genus"] == pytest.approx(alone["eer"])
    assert figures["eer"] == pytest.approx(retrieval_metrics(points, species, metrics=["eer"])["eer"])


def test_each_of_several_values_of_a_metric_names_its_level():
    points, species, names = torch.randn(60, 4), torch.arange(60) % 6, ["spread", "spectrum", "norm"]
    metrics = [*names, *(f"{name}:genus" for name in names)]
    figures = retrieval_metrics(points, {"genus": species // 2, "species": species}, metrics=metrics)
    of_species, of_genus = (retrieval_metrics(points, labels, metrics=names) for labels in (species, species // 2))
    expected = of_species | {f"{name}:genus": value for name, value in of_genus.items()}
    assert figures == pytest.approx(expected) and figures["density:genus"] != figures["density"]


@pytest.mark.parametrize(
    ("labels", "metric", "message"),
    [
        ([0, 0, 1, 1], "recall@1:genus", "recall@1:genus: unknown level 'genus'; the labels have no levels"),
        ({"genus": [0, 0, 1, 1], "species": [0, 1, 2, 2]}, "map@5:order", "expected one of genus, species"),
        ({"genus": [0, 1, 1, 1], "species": [0, 0, 2, 2]}, "h_ap", "a species is in more than one genus"),
        ({"genus": [0, 0, 1], "species": [0, 0, 2, 2]}, "h_ap", "labels of genus: expected one per embedding"),
        ({}, "h_ap", "expected at least one level"),
    ],
)
def test_labels_that_are_no_hierarchy(labels, metric: str, message: str):
    with pytest.raises(ValueError, match=message):
        retrieval_metrics(torch.randn(4, 2), labels, metrics=[metric])


def test_both_sides_need_the_same_levels():
    points, levels = torch.randn(4, 2), {"genus": [0, 0, 1, 1], "species": [0, 0, 2, 2]}
    for other in ([0, 0, 1, 1], {"species": [0, 0, 2, 2], "genus": [0, 0, 1, 1]}):
        with pytest.raises(ValueError, match="expected the same levels on both sides"):
            retrieval_metrics(points, levels, points, other, metrics=["h_ap"])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("h_ap:genus", "h_ap uses all levels; remove level genus"),
        ("recall@1:genus:species", "at most one library and one level"),
        ("map@10:oml:pml", "at most one library and one level"),
        ("recall@1:Genus", "String should match pattern"),
        ("recall@1:", "String should match pattern"),
    ],
)
def test_names_of_levels(name: str, message: str):
    with pytest.raises(ValueError, match=message):
        retrieval_metrics(torch.randn(4, 2), [0, 0, 1, 1], metrics=[name])


def test_names_are_reported_as_requested():
    config = MetricConfig.variants["map_at_k"](k=(5, 10), compat="oml", level="genus")
    assert config.names() == ("map@5:oml:genus", "map@10:oml:genus")
