"""All retrieval metrics from one pass of nearest neighbours."""

from collections.abc import Sequence

from torch import Tensor

from dmlkit.manifolds.base import Manifold
from dmlkit.metrics.base import MetricConfig, Ranking
from dmlkit.metrics.neighbors import nearest_neighbors


def retrieval_metrics(
    embeddings: Tensor, labels: Tensor, *, manifold: Manifold, metrics: Sequence[MetricConfig]
) -> dict[str, float]:
    """Score embeddings by searching each one among all the others.

    Queries without another image of their class are left out.

    Args:
        embeddings: (N, D) points on the manifold.
        labels: (N,) int64.
        manifold: the geometry whose similarity ranks the neighbours.
        metrics: which to compute; all share one search.

    Returns:
        Fractions by name, e.g. ``{"recall@1": 0.93, "map@r": 0.61}``.

    Raises:
        ValueError: no label occurs twice.
    """
    _, inverse, counts = labels.unique(return_inverse=True, return_counts=True)
    positives = counts[inverse] - 1  # (N,)
    queries = positives > 0
    if not queries.any():
        raise ValueError("retrieval needs at least one class with two images")
    depth = max(metric.depth(int(positives.max())) for metric in metrics)
    neighbors = nearest_neighbors(manifold, embeddings, min(depth, len(labels) - 1))
    ranking = Ranking((labels[neighbors] == labels[:, None])[queries], positives[queries])
    return {name: value for metric in metrics for name, value in metric.compute(ranking).items()}
