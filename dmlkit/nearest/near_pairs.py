"""Points that are close to others: all pairs above a threshold, nearest neighbors, and the graph of neighbors.

Pairs are found block by block, in bounded memory.
"""

from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dmlkit.errors import UserError
from dmlkit.manifolds.base import Manifold, frechet_mean
from dmlkit.manifolds.products import inner_products_into
from dmlkit.nearest.search import QUERY_ROWS, Gallery, Neighbors

MOST_PAIRS = 5_000_000  # 100 MB here, 2 GB while they are grouped
BLOCK_ROWS = 2048  # of both sides: float64 distances of a block and their temporaries take 32 MB each
# Unit vectors in float32 are as long as 1 but for 2e-7, so that the cosine of equal ones is 1 - 4e-7 to 1 + 4e-7 (2 to
# 2 048 dimensions): no cosine above this can be distinguished from 1.
ALIKE = 1 - 1e-6
CHECKED = 2**16  # pairs whose similarity is computed exactly at once: 64 MB at 128 dimensions


class NearPairs(NamedTuple):
    """Pairs whose similarity reaches a threshold, sorted by the first and then the second."""

    first: Tensor  # (P,) int64, rows of the one side
    second: Tensor  # (P,) int64, rows of the other; of a single side always after ``first``
    similarities: Tensor  # (P,) float64


@torch.no_grad()
def near_pairs(
    manifold: Manifold,
    points: Tensor,
    others: Tensor | None,
    threshold: float,
    *,
    advance: Callable[[int], None] = lambda _: None,
) -> NearPairs:
    """Find every pair whose similarity, computed in float64, is at least a threshold.

    Inner products are compared in float32 first, with a margin above their rounding (Higham 2002, eq. 3.5);
    distances in float64, since they cancel near zero. Memory holds one block of them, and the pairs found.

    Args:
        others: (M, D) to pair them with; None: pairs within the points, each once.
        threshold: minimum similarity; cosines above `ALIKE` count as 1.

    Example:
        >>> from dmlkit.manifolds import Euclidean
        >>> line = torch.tensor([[0.0], [0.5], [3.0]])
        >>> near_pairs(Euclidean(1), line, None, -1.0).second.tolist()
        [1]
    """
    least = min(threshold, ALIKE) if manifold.similarity_name.endswith("cosine") else threshold
    columns = points if others is None else others
    blocks: list[tuple[Tensor, Tensor, Tensor]] = []
    count, reported = 0, 0
    for first, second, share in _candidates(manifold, points, others, least):
        if others is None:  # each pair once, and none of a point with itself
            ascending = first < second
            first, second = first[ascending], second[ascending]
        for firsts, seconds in zip(first.split(CHECKED), second.split(CHECKED), strict=True):
            exact = manifold.paired_similarity(points[firsts].double(), columns[seconds].double())
            is_near = exact >= least
            blocks.append((firsts[is_near], seconds[is_near], exact[is_near]))
            count += int(is_near.sum())
            if count > MOST_PAIRS:
                raise UserError(
                    f"--threshold {threshold:g}: more than {MOST_PAIRS:,} pairs reach it; choose a higher threshold"
                )
        done = round(share * len(points))
        advance(done - reported)
        reported = done
    empty = torch.empty(0, dtype=torch.int64)
    first, second, similarities = (
        torch.cat(column) for column in zip((empty, empty, torch.empty(0, dtype=torch.float64)), *blocks, strict=True)
    )
    order = (first * max(len(points), len(columns)) + second).argsort()
    return NearPairs(first[order], second[order], similarities[order])


def check_reachable(manifold: Manifold, threshold: float, option: str = "--threshold") -> None:
    """Raise a `UserError` for a threshold that is above the largest similarity, infinite or nan."""
    name = manifold.similarity_name
    highest = 0.0 if name.endswith("distance") else 1.0 if name.endswith("cosine") else torch.inf
    if not -torch.inf < threshold <= highest:
        allowed = "a number" if highest == torch.inf else f"at most {highest:g}"
        raise UserError(f"{option} {threshold:g}: expected {allowed}, since the similarity is {name.replace('_', ' ')}")


def _candidates(
    manifold: Manifold, points: Tensor, others: Tensor | None, threshold: float
) -> Iterator[tuple[Tensor, Tensor, float]]:
    """Yield the rows of all pairs that may reach a threshold, and the share of all pairs that was compared."""
    sides = [points, points if others is None else others]
    if manifold.similarity_name.endswith("distance"):
        floor = threshold - 1e-5 * max(1.0, abs(threshold))  # float64 products round far less

        def compare(rows: Tensor, columns: Tensor) -> Tensor:
            return manifold.similarity(rows.double(), columns.double())
    else:
        sides = [manifold.product_vectors(side) for side in sides]
        longest = [float(side.norm(dim=1).max()) for side in sides]
        floor = threshold - 1.01 * (sides[0].shape[1] + 4) * 2.0**-23 * longest[0] * longest[1]

        def compare(rows: Tensor, columns: Tensor) -> Tensor:
            return inner_products_into(rows, columns, torch.empty(len(rows), len(columns)))

    done, whole = 0, len(points) * len(sides[1])
    for low in range(0, len(points), BLOCK_ROWS):
        rows = sides[0][low : low + BLOCK_ROWS]
        for start in range(low if others is None else 0, len(sides[1]), BLOCK_ROWS):
            is_near = (compare(rows, sides[1][start : start + BLOCK_ROWS]) >= floor).numpy()
            cells = np.divmod(np.flatnonzero(is_near), is_near.shape[1])  # 2 to 3 times as fast as nonzero in 2-D
            first, second = (torch.from_numpy(numbers) for numbers in cells)
            done += is_near.size * (2 if others is None and low < start else 1)
            yield first + low, second + start, done / whole


def complete_groups(pairs: NearPairs, count: int) -> list[Tensor]:
    """Return the clusters of complete linkage at the threshold of the pairs: within a cluster every pair reaches it.

    Starting with the most similar ones, two clusters are merged if all pairs between them are given; their similarity
    is that of the least similar pair. Single linkage would join dissimilar images through a chain of others. Each
    connected component is grouped alone, so that memory holds the pairs of one at a time.

    Returns:
        Groups (n,) int64 of at least two, their rows ascending; the one with the smallest row first.

    Example:
        >>> chain = NearPairs(torch.tensor([0, 1]), torch.tensor([1, 2]), torch.tensor([0.99, 0.98]).double())
        >>> complete_groups(chain, 3)  # 0 and 2 are not similar
        [tensor([0, 1])]
    """
    part_of = torch.from_numpy(components_of(pairs.first, pairs.second, count))[pairs.first]
    order = part_of.argsort(stable=True)
    sizes = part_of.unique(return_counts=True)[1].tolist()
    groups: list[Tensor] = []
    for rows in order.split(sizes):
        members = torch.cat([pairs.first[rows], pairs.second[rows]]).unique()
        if len(rows) == len(members) * (len(members) - 1) // 2:  # every two are alike
            groups.append(members)
        else:
            columns = (pairs.first[rows].tolist(), pairs.second[rows].tolist(), pairs.similarities[rows].tolist())
            groups += _merge(list(zip(*columns, strict=True)))
    return sorted(groups, key=lambda group: int(group[0]))


def components_of(first: Tensor, second: Tensor, count: int) -> np.ndarray:
    """Return the connected component (``count``,) of each point, given the ends of the links."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    links = coo_array((np.ones(len(first)), (first.numpy(), second.numpy())), shape=(count, count))
    return connected_components(links, directed=False)[1]


def _merge(edges: list[tuple[int, int, float]]) -> list[Tensor]:
    """Merge the two most similar clusters until none are joined by all pairs; of equally similar ones the first."""
    members: dict[int, list[int]] = {}
    links: dict[int, dict[int, float]] = {}  # of two clusters, where all pairs between them are there
    for one, other, similarity in edges:
        for row, neighbor in ((one, other), (other, one)):
            members.setdefault(row, [row])
            links.setdefault(row, {})[neighbor] = similarity
    waiting = [(-similarity, one, other) for one, other, similarity in edges]
    heapify(waiting)
    while waiting:
        negative, kept, gone = heappop(waiting)
        if links.get(kept, {}).get(gone) != -negative:
            continue  # one of them has become part of another since
        members[kept] += members.pop(gone)
        ours, theirs = links.pop(kept), links.pop(gone)
        links[kept] = {neighbor: min(ours[neighbor], theirs[neighbor]) for neighbor in ours.keys() & theirs.keys()}
        for neighbor in (ours.keys() | theirs.keys()) - {kept, gone}:
            links[neighbor].pop(kept, None)
            links[neighbor].pop(gone, None)
        for neighbor, similarity in links[kept].items():
            links[neighbor][kept] = similarity
            heappush(waiting, (-similarity, min(kept, neighbor), max(kept, neighbor)))
    return [torch.tensor(sorted(rows)) for rows in members.values() if len(rows) > 1]


LEAST = 1e-12  # dissimilarity of equal points: scipy takes an entry of 0 for none


def neighbors_of(
    manifold: Manifold,
    points: Tensor,
    k: int,
    others: Tensor | None = None,
    *,
    advance: Callable[[int], None] = lambda _: None,
) -> Neighbors:
    """Return the k nearest other points of each point (N, D), nearest first, exactly; see `Gallery`.

    Args:
        others: (M, D) to search in, at least k; None: the points, at least k + 1, each without itself.

    Example:
        >>> from dmlkit.manifolds import Euclidean
        >>> neighbors_of(Euclidean(1), torch.tensor([[0.0], [1.0], [3.0]]), 1).indices
        tensor([[1],
                [0],
                [1]])
    """
    gallery = Gallery(manifold, points if others is None else others)
    blocks: list[Neighbors] = []
    for rows in torch.arange(len(points)).split(QUERY_ROWS):
        if others is None:
            blocks.append(gallery.search(points[rows], k + 1).without(rows))
        else:
            blocks.append(gallery.search(points[rows], k))
        advance(len(rows))
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

    name, count = manifold.similarity_name, len(points)
    origin = (
        0.0 if name.endswith("distance") else 1.0 if name.endswith("cosine") else float(neighbors.similarities.max())
    )
    rows = torch.arange(count, dtype=torch.int32).repeat_interleave(neighbors.indices.shape[1])  # scipy < 1.17: 32 bits
    columns, values = neighbors.indices.flatten().int(), origin - neighbors.similarities.flatten().double()
    graph = coo_array((values.clamp(min=LEAST).numpy(), (rows.numpy(), columns.numpy())), shape=(count, count)).tocsr()
    part_of = torch.from_numpy(components_of(rows, columns, count)).long()
    if part_of.any():
        first, second = _links(manifold, points, part_of)
        similarities = manifold.paired_similarity(points[first].double(), points[second].double())
        values = (origin - similarities).clamp(min=LEAST).detach().numpy()
        graph = graph + coo_array((values, (first.int().numpy(), second.int().numpy())), shape=(count, count)).tocsr()
    return graph.maximum(graph.T), origin


@torch.no_grad()
def _links(manifold: Manifold, points: Tensor, part_of: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows that join components, one pair fewer: of two adjacent ones those nearest to the other's mean."""
    from scipy.sparse.csgraph import minimum_spanning_tree

    members = part_of.argsort(stable=True).split(part_of.bincount().tolist())
    means = torch.stack([frechet_mean(manifold, points[rows]) for rows in members])
    similarities: Any = manifold.similarity(means, means).numpy()
    tree = minimum_spanning_tree(np.maximum(similarities.max() - similarities, LEAST)).tocoo()
    ends: list[tuple[Tensor, Tensor]] = []
    for one, other in zip(tree.row.tolist(), tree.col.tolist(), strict=True):
        to_means = (
            manifold.paired_similarity(points[members[a]].double(), means[b]) for a, b in ((one, other), (other, one))
        )
        ends.append(
            tuple(members[part][int(scores.argmax())] for part, scores in zip((one, other), to_means, strict=True))
        )
    first, second = zip(*ends, strict=True)
    return torch.stack(first), torch.stack(second)
