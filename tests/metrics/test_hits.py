"""Hit lists: the first table of the MPA paper digit by digit, naive loops, and contradictions refused."""

import numpy as np
import pytest

from dmlkit.metrics import metrics_from_hits
from tests.metrics.naive import at_rank

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
    rng = np.random.default_rng(0)
    hits = rng.random((300, 12)) < 0.3
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
def test_bad_input(hits, positives, metrics, message):
    with pytest.raises(ValueError, match=message):
        metrics_from_hits(hits, positives, metrics)


def test_a_list_with_all_positives_may_end_before_r():
    assert metrics_from_hits([[1, 1]], [2], ["map@r"]) == {"map@r": 1.0}
