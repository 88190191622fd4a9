"""Search metrics over items with several labels against loops: what shares a label is relevant."""

import numpy as np
import pytest
import torch

from dmlkit.manifolds import Euclidean
from dmlkit.metrics import retrieval_metrics
from dmlkit.metrics.ranking import gpu_search, rankings
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
    found = retrieval_metrics(points, matrix, manifold=Euclidean(2), metrics=list(NAMES))
    assert found == pytest.approx(naive(points, matrix, points, matrix, lambda q, j: q == j), abs=1e-9)
    items, labels = random_items(1, 9)
    groups, others = np.arange(12) % 4, np.arange(9) % 5
    found = retrieval_metrics(points, matrix, items, labels.numpy(), Euclidean(2), list(NAMES), ids=(groups, others))
    hidden = lambda q, j: groups[q] == others[j]  # noqa: E731
    assert found == pytest.approx(naive(points, matrix, items, labels, hidden), abs=1e-9)


def test_one_label_each_gives_the_plain_metrics():
    points, _ = random_items(2, 30)
    labels = torch.arange(30) % 4
    matrix = torch.nn.functional.one_hot(labels).bool()
    options = {"manifold": Euclidean(2), "metrics": list(NAMES)}
    assert retrieval_metrics(points, matrix, **options) == retrieval_metrics(points, labels, **options)


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
def test_what_is_wrong_with_a_matrix_is_named(matrix, gallery, metrics, said: str):
    points = torch.eye(2)
    with pytest.raises(ValueError, match=said):
        retrieval_metrics(points, matrix, None if gallery is None else points, gallery, metrics=metrics)
