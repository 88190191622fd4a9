"""Hit lists and bad input: the first table of the MPA paper digit by digit, naive loops, and one clear line each."""

import numpy as np
import pytest
import torch

from dmlkit.manifolds import Euclidean, Sphere
from dmlkit.metrics import Labeled, metrics_from_hits, retrieval_metrics, score_retrieval
from tests.metrics.naive import at_rank

POINTS = torch.eye(4).repeat(2, 1)
LABELS = torch.arange(4).repeat(2)
BROKEN = POINTS.clone()
BROKEN[5, 1] = float("nan")
BROKEN[7, 0] = float("inf")
ZERO = POINTS.clone()
ZERO[3] = ZERO[6] = 0


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((BROKEN, LABELS), {}, "embeddings: 2 of 8 rows hold NaN or infinity, the first is row 5"),
        ((POINTS, LABELS, BROKEN, LABELS), {}, "gallery: 2 of 8 rows hold NaN or infinity, the first is row 5"),
        ((POINTS, LABELS[:7]), {}, "labels: expected one per embedding, shape (8,), got (7,)"),
        ((POINTS, LABELS, POINTS, LABELS[:3]), {}, "labels: expected one per embedding, shape (8,), got (3,)"),
        ((POINTS, LABELS.float()), {}, "labels: expected integers or strings, got float32"),
        ((POINTS, LABELS.tolist(), POINTS, list("abcdabcd")), {}, "labels: the queries have int64 and the gallery <U1"),
        ((POINTS, LABELS * 0), {}, "labels: all 8 embeddings are of one class; retrieval needs at least two"),
        ((POINTS[:4], LABELS[:4]), {}, "labels: no query has another item of its class to find, so there"),
        ((POINTS, LABELS, POINTS, LABELS + 9), {}, "labels: no query has another item of its class to find, so there"),
        ((POINTS, LABELS, POINTS[:0], LABELS[:0]), {}, "gallery: expected shape (N, D) with at least one row, got (0"),
        ((POINTS[:0], LABELS[:0]), {}, "embeddings: expected shape (N, D) with at least one row, got (0, 4)"),
        ((POINTS[0], LABELS), {}, "embeddings: expected shape (N, D) with at least one row, got (4,)"),
        ((POINTS, LABELS, POINTS), {}, "gallery and gallery_labels: give both or neither"),
        ((POINTS, LABELS, torch.ones(8, 3), LABELS), {}, "gallery: expected 4 coordinates, got 3"),
        ((POINTS, LABELS), {"manifold": Sphere(3)}, "embeddings: expected 3 coordinates, got 4"),
        ((POINTS, LABELS), {"ids": (LABELS, LABELS)}, "ids: expected a pair, the ids of the embeddings and those of"),
        ((POINTS, LABELS, POINTS, LABELS), {"ids": np.arange(8)}, "ids: expected a pair, the ids of the embeddings"),
        ((ZERO, LABELS), {}, "embeddings: 2 of 8 rows are zero and have no direction for the cosine, the first"),
        ((POINTS, LABELS, ZERO, LABELS), {}, "gallery: 2 of 8 rows are zero"),
        ((POINTS * 1j, LABELS), {}, "embeddings: expected real numbers, got torch.complex64"),
        *(
            ((POINTS.numpy().astype(kind), LABELS), {}, "embeddings: expected real numbers of up to 64 bits, got")
            for kind in ("complex64", "U8", "longdouble", "M8[s]", [("a", "f4")])
        ),
        ((POINTS * 1e25, LABELS), {"manifold": Euclidean(4)}, "embeddings: row 0: its largest coordinate is "),
        ((POINTS * 1e25, LABELS), {"manifold": Sphere(4)}, "embeddings: row 0: its length is "),
        ((POINTS, LABELS), {"metrics": []}, "expected at least one metric"),
        ((POINTS, LABELS), {"metrics": ["recall@0"]}, "'recall@0': k must be at least 1, got 0"),
        ((POINTS, LABELS), {"metrics": [f"recall@{10**20}"]}, f"'recall@{10**20}': k must fit into 64 bits"),
        ((POINTS, LABELS), {"metrics": ["recall@²"]}, "unknown metric 'recall@²'"),
        ((POINTS, LABELS), {"metrics": ["recal@1"]}, "unknown metric 'recal@1'; expected one of ami, ari, auroc"),
        ((POINTS, LABELS), {"metrics": ["map@5:x"]}, "map@5:x: unknown level 'x', nor is it one of pml, oml, mpa"),
    ],
)  # fmt: skip
def test_bad_input(arguments, options, message):
    with pytest.raises(ValueError) as raised:
        retrieval_metrics(*arguments, **options)
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value)


def test_score_retrieval_takes_labeled_sides():
    with pytest.raises(TypeError, match=r"^expected queries and gallery as Labeled\(embeddings, labels\), got Tensor$"):
        score_retrieval(POINTS, LABELS)
    with pytest.raises(ValueError, match="ids: give those of the queries and of the gallery, or neither"):
        score_retrieval(Labeled(POINTS, LABELS, LABELS), Labeled(POINTS, LABELS))
    with pytest.raises(ValueError, match="ids: give those of the queries and of the gallery, or neither"):
        score_retrieval(Labeled(POINTS, LABELS, LABELS))


def test_read_only_half_precision_and_big_endian_arrays_are_read():
    half, other = POINTS.numpy().astype(np.float16), POINTS.numpy().astype(">f4")
    half.flags.writeable = False
    expected = retrieval_metrics(POINTS, LABELS)
    assert retrieval_metrics(half, LABELS) == retrieval_metrics(other, LABELS) == expected


@pytest.mark.parametrize("scale", [1e-40, 1e-7, 3e19, 1e38])
def test_directions_count_however_long_the_rows_are_w11(scale: float):
    rows = torch.randn(60, 8, generator=torch.Generator().manual_seed(0)).clamp(-3, 3)
    labels = torch.arange(60) % 6
    expected = retrieval_metrics(rows, labels, metrics=["recall@1", "map@r"])
    assert retrieval_metrics(rows * scale, labels, metrics=["recall@1", "map@r"]) == pytest.approx(expected, abs=1e-3)
    wide = rows.double() * scale * scale**7  # down to 1e-320, up to 1e304
    assert retrieval_metrics(wide, labels, metrics=["recall@1", "map@r"]) == pytest.approx(expected, abs=1e-3)


MPA_TABLE_1 = {  # Saeki et al. 2022: 4 positives; Recall@10, Precision@10, MAP@R, MAP@10, nDCG@10 in percent
    (1, 0, 0, 0, 0, 0, 0, 0, 0, 0): ("100.0", "10.0", "25.0", "10.0", "39.0"),
    (1, 0, 0, 0, 0, 0, 0, 0, 0, 1): ("100.0", "20.0", "25.0", "12.0", "50.3"),
    (1, 0, 1, 0, 0, 0, 0, 0, 0, 0): ("100.0", "20.0", "41.7", "16.7", "58.6"),
    (1, 0, 1, 0, 0, 0, 1, 0, 0, 1): ("100.0", "40.0", "41.7", "25.0", "82.9"),
    (1, 1, 1, 1, 0, 0, 0, 0, 0, 0): ("100.0", "40.0", "100.0", "40.0", "100.0"),
}


@pytest.mark.parametrize(("hits", "printed"), MPA_TABLE_1.items())
def test_mpa_table_1(hits, printed):
    names = ["recall@10", "precision@10", "map@r", "map@10:mpa", "ndcg@10"]
    values = metrics_from_hits([hits], [4], names)
    assert tuple(f"{100 * values[name]:.1f}" for name in names) == printed


def test_against_naive_loops():
    hits = np.random.default_rng(0).random((300, 12)) < 0.3
    positives = hits.sum(1)
    kept = positives > 0
    values = metrics_from_hits(
        hits[kept], positives[kept], ["recall@3", "precision@5", "r_precision", "map@r", "map@7", "mrr", "ndcg@6"]
    )
    cases = [("recall", 3), ("precision", 5), ("r_precision", 1), ("map@r", 1), ("map", 7), ("mrr", 1), ("ndcg", 6)]
    naive = [
        np.mean([at_rank(row.astype(int).tolist(), int(row.sum()), kind, k) for row in hits[kept]]) for kind, k in cases
    ]
    assert list(values.values()) == pytest.approx(naive, abs=1e-12)


def test_queries_without_positives_and_short_lists_are_said():
    with pytest.warns(UserWarning, match="1 of 3 queries have no positive"):
        assert metrics_from_hits([[1, 0], [0, 0], [0, 1]], [1, 0, 1], ["recall@1"]) == {"recall@1": 0.5}
    with pytest.warns(UserWarning, match="recall@9: only 2 items are ranked"):
        metrics_from_hits([[1, 0]], [1], ["recall@9"])
    with pytest.warns(UserWarning, match="mrr is 0 for the 1 queries"):
        assert metrics_from_hits([[0, 0], [0, 1]], [1, 1], ["mrr"]) == {"mrr": 0.25}


@pytest.mark.parametrize(
    ("hits", "positives", "metrics", "message"),
    [
        ([1, 0], [1], ["recall@1"], r"hits: expected shape \(N, K\), got \(2,\)"),
        ([[1, 0]], [1, 1], ["recall@1"], "positives: expected 1 integers"),
        ([[1, 0]], [1.0], ["recall@1"], "positives: expected 1 integers"),
        ([[1, 2]], [3], ["recall@1"], "hits: expected only 0 and 1"),
        ([[0, 0], [1, 1]], [1, 1], ["recall@1"], "hits: query 1 has 2 hits but 1 positives"),
        ([[0, 0]], [0], ["recall@1"], "positives: no query has any"),
        ([[1, 0]], [3], ["map@r"], "hits: map@r needs the first R items, but 1 lists of 2 items end before R"),
        ([[1, 0]], [1], ["nmi"], "nmi is computed from embeddings, not from hits"),
    ],
)
def test_hits_bad_input(hits, positives, metrics, message):
    with pytest.raises(ValueError, match=message):
        metrics_from_hits(hits, positives, metrics)


def test_a_list_with_all_positives_may_end_before_r():
    assert metrics_from_hits([[1, 1]], [2], ["map@r"]) == {"map@r": 1.0}


@pytest.mark.parametrize("manifold", [None, Euclidean(8, similarity="dot"), Euclidean(8)])
def test_queries_and_a_gallery_of_two_dtypes_are_compared_in_the_wider_one(manifold):
    random = np.random.default_rng(0)
    points, items = random.random((10, 8)).astype(np.float32), random.random((12, 8)).astype(np.float32)
    labels, names = (np.arange(10) % 3, np.arange(12) % 3), ["recall@1", "map", "cmc@1:cuhk03", "eer", "oscr"]
    expected = retrieval_metrics(points.astype(float), labels[0], items.astype(float), labels[1], manifold, names)
    for one, other in ((float, np.float32), (np.float32, float)):
        x, y = points.astype(one), torch.from_numpy(items.astype(other))
        assert retrieval_metrics(x, labels[0], y, labels[1], manifold, names) == expected


def test_lists_that_lack_a_positive_have_no_average_precision_and_no_level():
    for name in ("map", "h_ap"):
        with pytest.raises(ValueError, match=rf"hits: {name} needs all positives, but 1 lists of 4 items lack some"):
            metrics_from_hits([[1, 0, 1, 0], [1, 1, 0, 0]], [5, 2], [name])
        assert metrics_from_hits([[1, 0, 1, 0]], [2], [name])[name] == pytest.approx((1 + 2 / 3) / 2)
    with pytest.raises(ValueError, match="recall@1:genus: hits have no levels; remove level genus"):
        metrics_from_hits([[1, 0]], [1], ["recall@1:genus"])


def test_an_unknown_treatment_of_ties_is_refused():
    with pytest.raises(ValueError, match="ties: got 'worst', expected one of expected, pessimistic"):
        retrieval_metrics(POINTS, LABELS, ties="worst")  # pyright: ignore[reportArgumentType]
