"""Nearest neighbors of each point among all others, and the graph of them."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dmlkit.embedding.search import Gallery, Neighbors
from dmlkit.manifolds.base import Manifold
from dmlkit.manifolds.numerics.frechet import frechet_mean

QUERIES = 4096  # searched at once
LEAST = 1e-12  # dissimilarity of equal points: scipy takes an entry of 0 for none


def neighbors_of(
    manifold: Manifold, points: Tensor, k: int, *, advance: Callable[[int], None] = lambda _: None
) -> Neighbors:
    """Return the k nearest other points of each point (N, D), nearest first, exactly; see `Gallery`.

    Args:
        manifold: geometry whose similarity is the order.
        points: (N, D), at least k + 1.
        k: number of neighbors.
        advance: called with the number of points done.

    Example:
        >>> from dmlkit.manifolds import Euclidean
        >>> neighbors_of(Euclidean(1), torch.tensor([[0.0], [1.0], [3.0]]), 1).indices
        tensor([[1],
                [0],
                [1]])
    """
    gallery = Gallery(manifold, points)
    blocks: list[Neighbors] = []
    for own in torch.arange(len(points)).split(QUERIES):
        similarities, indices = gallery.search(points[own], k + 1)
        others = indices != own[:, None]
        others[others.all(1), -1] = False  # of more than k points equal to it, which stand before it
        blocks.append(Neighbors(similarities[others].view(-1, k), indices[others].view(-1, k)))
        advance(len(own))
    return Neighbors.joined(blocks, k)


def connected_graph(manifold: Manifold, points: Tensor, neighbors: Neighbors) -> tuple[Any, float]:
    """Return the dissimilarities of neighbors as a symmetric, connected graph.

    A dissimilarity is a distance, 1 minus a cosine, or the largest product minus a product. Components are joined by
    the shortest links between their means (a spanning tree), since the clusterings of scikit-learn need a connected
    graph.

    Returns:
        A CSR array (N, N) in float64, and the similarity whose dissimilarity is 0.
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    name, count = manifold.similarity_name, len(points)
    origin = (
        0.0 if name.endswith("distance") else 1.0 if name.endswith("cosine") else float(neighbors.similarities.max())
    )
    rows = torch.arange(count).repeat_interleave(neighbors.indices.shape[1])
    columns, values = neighbors.indices.flatten(), origin - neighbors.similarities.flatten().double()
    graph = coo_array((values.clamp(min=LEAST).numpy(), (rows.numpy(), columns.numpy())), shape=(count, count)).tocsr()
    parts, part_of = connected_components(graph, directed=False)
    if parts > 1:
        first, second = _links(manifold, points, torch.from_numpy(part_of).long(), parts)
        similarities = manifold.paired_similarity(points[first].double(), points[second].double())
        values = (origin - similarities).clamp(min=LEAST).detach().numpy()
        graph = graph + coo_array((values, (first.numpy(), second.numpy())), shape=(count, count)).tocsr()
    return graph.maximum(graph.T), origin


@torch.no_grad()
def _links(manifold: Manifold, points: Tensor, part_of: Tensor, parts: int) -> tuple[Tensor, Tensor]:
    """Return the rows to join, (parts - 1,) each: of two adjacent components those nearest to the other's mean."""
    from scipy.sparse.csgraph import minimum_spanning_tree

    members = part_of.argsort(stable=True).split(part_of.bincount().tolist())
    means = torch.stack([frechet_mean(manifold, points[rows]) for rows in members])
    similarities: Any = manifold.similarity(means, means).numpy()
    tree = minimum_spanning_tree(np.maximum(similarities.max() - similarities, LEAST)).tocoo()
    ends: list[tuple[Tensor, Tensor]] = []
    for one, other in zip(tree.row.tolist(), tree.col.tolist(), strict=True):
        near = (
            manifold.paired_similarity(points[members[a]].double(), means[b]) for a, b in ((one, other), (other, one))
        )
        ends.append(tuple(members[part][int(found.argmax())] for part, found in zip((one, other), near, strict=True)))
    first, second = zip(*ends, strict=True)
    assert len(first) == parts - 1
    return torch.stack(first), torch.stack(second)
