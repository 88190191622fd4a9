"""Every search metric against naive loops, ties against every order of the tied items."""

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import normalize

from dmlkit.manifolds import Euclidean, Sphere
from dmlkit.metrics import Labeled, MapAtKConfig, PrecisionConfig, retrieval_metrics, score_retrieval
from dmlkit.metrics.ranking import cpu_search, rankings
from tests.metrics.naive import expected, pessimistic

CASES = [
    ("recall@1", "recall", 1),
    ("recall@3", "recall", 3),
    ("recall@50", "recall", 50),
    ("cmc@2", "cmc", 2),
    ("precision@1", "precision", 1),
    ("precision@4", "precision", 4),
    ("r_precision", "r_precision", 1),
    ("map@r", "map@r", 1),
    ("map@3", "map", 3),
    ("map@50", "map", 50),
    ("map", "map", 1000),
    ("mrr", "mrr", 1),
    ("ndcg@2", "ndcg", 2),
    ("ndcg@50", "ndcg", 50),
]
LABELS = torch.arange(90) % 6
NAMES = [name for name, _, _ in CASES]


def naive_scores(points, labels, gallery, gallery_labels, hide, by):
    """Means over the queries with a positive, on 1-D points; ``hide(q, g)`` says that g is q itself."""
    values = {name: [] for name in NAMES}
    for q, (x, label) in enumerate(zip(points, labels, strict=True)):
        kept = [g for g in range(len(gallery)) if not hide(q, g)]
        scores = [-((float(x) - float(gallery[g])) ** 2) for g in kept]
        hits = [gallery_labels[g] == label for g in kept]
        if any(hits):
            for name, kind, k in CASES:
                values[name].append(by(scores, hits, kind, k))
    return {name: np.mean(column) for name, column in values.items() if column}


small = st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 2)), min_size=2, max_size=8)


@settings(deadline=None, max_examples=40)
@given(small, st.sampled_from(["expected", "pessimistic"]))
def test_among_themselves_with_ties_duplicates_and_singletons(items, ties):
    points, labels = [x for x, _ in items], [y for _, y in items]
    by = expected if ties == "expected" else pessimistic
    naive = naive_scores(points, labels, points, labels, lambda q, g: q == g, by)
    if len(set(labels)) == 1 or not naive:
        with pytest.raises(ValueError, match="labels"):
            retrieval_metrics([[float(x)] for x in points], labels, manifold=Euclidean(1))
        return
    ours = score_retrieval(
        Labeled([[float(x)] for x in points], labels), manifold=Euclidean(1), metrics=NAMES, ties=ties
    )
    assert ours.values == pytest.approx(naive, abs=1e-12)
    assert ours.left_out == sum(labels.count(label) == 1 for label in labels)


@settings(deadline=None, max_examples=40)
@given(small, small, st.booleans(), st.sampled_from(["expected", "pessimistic"]))
def test_query_and_gallery(queries, gallery, with_ids, ties):
    x, y = [x for x, _ in queries], [y for _, y in queries]
    gx, gy = [x for x, _ in gallery], [y for _, y in gallery]
    ids, gallery_ids = np.arange(len(x)), np.arange(len(gx)) + len(x) // 2  # they overlap in part
    by = expected if ties == "expected" else pessimistic
    naive = naive_scores(x, y, gx, gy, lambda q, g: with_ids and ids[q] == gallery_ids[g], by)
    both = (ids, gallery_ids) if with_ids else None
    arguments = [np.array(x)[:, None], y, np.array(gx)[:, None], gy]
    if len({*y, *gy}) == 1 or not naive:
        with pytest.raises(ValueError, match="labels"):
            retrieval_metrics(*arguments, Euclidean(1), NAMES, ties=ties, ids=both)
        return
    sides = [
        Labeled(*arguments[:2], ids if with_ids else None),
        Labeled(*arguments[2:], gallery_ids if with_ids else None),
    ]
    assert score_retrieval(*sides, Euclidean(1), NAMES, ties=ties).values == pytest.approx(naive, abs=1e-12)


@pytest.mark.parametrize("classes", [3, 40])  # 19 positives a query: rows are sorted; about 1: counted
@pytest.mark.parametrize("ties", ["expected", "pessimistic"])
def test_random_embeddings(classes, ties, monkeypatch):
    monkeypatch.setattr(cpu_search, "BLOCK_ROWS", 7)
    monkeypatch.setattr(rankings, "BLOCK_QUERIES", 20)
    rng = np.random.default_rng(classes)
    points = rng.standard_normal((60, 1)).astype(np.float32).round(1)
    labels = rng.integers(0, classes, 60).tolist()
    naive = naive_scores(points[:, 0], labels, points[:, 0], labels, lambda q, g: q == g, pessimistic)
    if ties == "pessimistic":
        ours = score_retrieval(Labeled(points, labels), manifold=Euclidean(1), metrics=NAMES, ties=ties).values
        assert ours == pytest.approx(naive, abs=1e-12)
        return
    exact = points + np.arange(60, dtype=np.float32)[:, None] ** 2 * 1e-6  # no ties left
    naive = naive_scores(exact[:, 0], labels, exact[:, 0], labels, lambda q, g: q == g, pessimistic)
    ours = score_retrieval(Labeled(exact, labels), manifold=Euclidean(1), metrics=NAMES).values
    assert ours == pytest.approx(naive, abs=1e-12)


def test_a_large_tied_group_in_closed_form():
    """A collapsed model: one point for all. A random order finds one of h others among m first with probability h/m."""
    labels = np.arange(600) // 6
    values = retrieval_metrics(
        np.ones((600, 16), np.float32), labels, metrics=["recall@1", "r_precision", "precision@9"]
    )
    assert values == pytest.approx({"recall@1": 5 / 599, "r_precision": 5 / 599, "precision@9": 5 / 599}, abs=1e-12)


def test_equal_vectors_tie_wherever_they_lie():
    """A matrix product rounds equal columns differently; they must tie all the same."""
    half = np.random.default_rng(0).standard_normal((500, 512)).astype(np.float32)
    points = np.concatenate([half, half, half])  # each vector with label i twice, and once with another label
    labels = np.concatenate([np.arange(500), np.arange(500), np.roll(np.arange(500), 1)])
    first_two = score_retrieval(Labeled(points, labels), metrics=["recall@1"]).per_query["recall@1"][:1000]
    assert first_two.tolist() == [0.5] * 1000


def test_queries_inside_the_gallery_by_id():
    rng = np.random.default_rng(1)
    points, labels = rng.standard_normal((60, 8)), rng.integers(0, 6, 60)
    names = [f"image-{i}" for i in range(60)]
    chosen = rng.permutation(60)[:20]
    queries = Labeled(points[chosen], labels[chosen], [names[i] for i in chosen])
    inside = score_retrieval(queries, Labeled(points, labels, names), metrics=NAMES)
    among = score_retrieval(Labeled(points, labels), metrics=NAMES)
    for name in NAMES:
        assert inside.per_query[name].numpy() == pytest.approx(among.per_query[name].numpy()[chosen], abs=1e-12)


def test_labels_beyond_float32():
    labels = [2**24, 2**24 + 1, 2**24, 2**24 + 1, 2**53, 2**53 + 1]
    points = [[1.0, 0.0], [1.0, 0.01], [0.0, 1.0], [0.01, 1.0], [-1.0, 0.0], [-1.0, 0.01]]
    scores = score_retrieval(Labeled(points, labels), metrics=["recall@1"])
    assert scores.values == {"recall@1": 0.0}
    assert scores.left_out == 2


def test_k_beyond_the_gallery_is_clipped_and_said():
    points, labels = torch.randn(10, 4), torch.arange(10) // 5
    scores = score_retrieval(Labeled(points, labels), metrics=["precision@9", "precision@100", "recall@100"])
    assert scores.values["precision@100"] == scores.values["precision@9"] == pytest.approx(4 / 9)
    assert scores.notes == (
        "precision@100: only 9 items are ranked; k is clipped to that",
        "recall@100: only 9 items are ranked; k is clipped to that",
    )
    with pytest.warns(UserWarning, match="clipped"):
        retrieval_metrics(points, labels, metrics=["recall@100"])


@pytest.mark.parametrize("labels", [LABELS, torch.eye(6, dtype=torch.bool)[LABELS]], ids=["classes", "sets"])
@pytest.mark.parametrize("has_gallery", [False, True])
def test_a_note_says_where_embeddings_are_too_near_for_float32(labels, has_gallery):
    noise = torch.randn(90, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for size in (0.03, 0.0005):
        points = normalize(1 + size * (noise + 2 * noise[LABELS]), dim=1)
        sides = [Labeled(points, labels)] + [Labeled(points.flip(0), labels.flip(0))] * has_gallery
        assert score_retrieval(*sides, metrics=["recall@1"]).notes == ()  # float64 has digits enough
        sides = [replace(side, embeddings=side.embeddings.float()) for side in sides]
        notes = score_retrieval(*sides, metrics=["recall@1"]).notes
        median = (points @ points.T)[LABELS[:, None] != LABELS].median().item()
        assert [note[:55] for note in notes] == ["the median cosine of embeddings of different classes is"] * (
            median > 0.9999
        )
        assert all(1 - float(note[56:65]) == pytest.approx(1 - median, rel=0.1) for note in notes)


def test_queries_without_positives_are_left_out_and_counted():
    points = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0]])
    scores = score_retrieval(Labeled(points, [0, 0, 1]), metrics=["recall@1"])
    assert scores.values == {"recall@1": 1.0}
    assert (scores.left_out, scores.queries.tolist()) == (1, [0, 1])
    assert scores.notes == ("1 of 3 queries are left out, because no other item of their class is ranked",)


def test_nearest_neighbours():
    points, labels = torch.randn(50, 4), torch.arange(50) % 5
    products = Sphere(4).from_features(points) @ Sphere(4).from_features(points).T
    nearest = score_retrieval(Labeled(points, labels)).nearest
    assert nearest.tolist() == products.fill_diagonal_(-2).argmax(1).tolist()


def test_compat_follows_the_others_divisors():
    hits_first = [[1.0, 0.0], [1.0, 0.01], [1.0, 0.1], [0.0, 1.0], [1.0, 0.3], [0.1, 1.0]]
    labels = [0, 0, 1, 1, 0, 0]
    values = score_retrieval(
        Labeled(hits_first[:1], labels[:1]),
        Labeled(hits_first[1:], labels[1:]),
        metrics=[
            MapAtKConfig(k=(3,)),
            "map@3:pml",
            "map@3:oml",
            "map@3:mpa",
            "precision@4:oml",
            PrecisionConfig(k=(4,)),
        ],
    ).values  # the nearest are right, wrong, right, right, wrong
    total = 1 + 2 / 3
    assert values == pytest.approx(
        {
            "map@3": total / 3,
            "map@3:pml": total / 3,
            "map@3:oml": total / 2,
            "map@3:mpa": total / 3,
            "precision@4:oml": 3 / 3,
            "precision@4": 3 / 4,
        }
    )


def test_euclidean_far_from_the_origin():
    """|x|^2 + |y|^2 - 2xy cancels in float32 at an offset of 1 000; the search must not."""
    rng = np.random.default_rng(2)
    points, labels = rng.standard_normal((200, 16)), rng.integers(0, 20, 200)
    near = retrieval_metrics(points.astype(np.float32), labels, manifold=Euclidean(16), metrics=NAMES)
    far = retrieval_metrics((points + 1000).astype(np.float32), labels, manifold=Euclidean(16), metrics=NAMES)
    assert far == pytest.approx(near, abs=0.02)


def test_no_top_level_warning_without_cause():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        retrieval_metrics(torch.randn(20, 4), torch.arange(20) % 4)


def test_search_ranks_only_the_best_positive_when_that_is_enough():
    points, labels = torch.randn(80, 4), torch.arange(80) % 4
    alone = retrieval_metrics(points, labels, metrics=["recall@1", "recall@5", "mrr"])
    together = retrieval_metrics(points, labels, metrics=["recall@1", "recall@5", "mrr", "map@r"])
    assert alone == {name: together[name] for name in alone}
