"""All pairs of points that are at least as alike as a threshold, found block by block."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dmlkit.errors import UserError
from dmlkit.manifolds.base import Manifold

MOST_PAIRS = 5_000_000  # 100 MB here, 2 GB while they are grouped
BLOCK_ROWS = 16_384  # of both sides of a product: an index of 8 MB at 128 dimensions
DISTANCE_ROWS = 2048  # float64 distances of a block and their temporaries: 32 MB each
# Unit vectors in float32 are as long as 1 but for 2e-7, so that the cosine of equal ones is 1 - 4e-7 to 1 + 4e-7 (2 to
# 2 048 dimensions): nothing tells a cosine above this from 1.
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
    """Every pair whose similarity, computed in float64, is at least a threshold.

    Inner products are compared in float32 first, with a margin above their rounding (Higham 2002, eq. 3.5), by faiss;
    distances in float64, since they cancel near zero. Memory holds one block of them, and what is found.

    Args:
        manifold: the geometry; its similarity is compared.
        points: (N, D).
        others: (M, D) to pair them with; None: pairs of two of the points, each once.
        threshold: the least similarity; of cosines those above `ALIKE` count as 1.
        advance: told N in all, little by little.

    Raises:
        UserError: more than `MOST_PAIRS` reach it.

    Example:
        >>> from dmlkit.manifolds import Euclidean
        >>> line = torch.tensor([[0.0], [0.5], [3.0]])
        >>> near_pairs(Euclidean(1), line, None, -1.0).second.tolist()
        [1]
    """
    is_distance = manifold.similarity_name.endswith("distance")
    if manifold.similarity_name.endswith("cosine"):
        threshold = min(threshold, ALIKE)
    search = _near_distances if is_distance else _near_products
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    count, told = 0, 0
    for first, second, share in search(manifold, points, others, threshold):
        for ones, twos in zip(first.split(CHECKED), second.split(CHECKED), strict=True):
            exact = manifold.paired_similarity(
                points[ones].double(), (points if others is None else others)[twos].double()
            )
            kept = exact >= threshold
            found.append((ones[kept], twos[kept], exact[kept]))
            count += int(kept.sum())
        if count > MOST_PAIRS:
            raise UserError(
                f"--threshold {threshold:g}: more than {MOST_PAIRS:,} pairs are as alike; choose a higher one"
            )
        done = round(share * len(points))
        advance(done - told)
        told = done
    empty = torch.empty(0, dtype=torch.int64)
    first, second, similarities = (
        torch.cat(column) for column in zip((empty, empty, torch.empty(0, dtype=torch.float64)), *found, strict=True)
    )
    order = (first * max(len(points), 0 if others is None else len(others)) + second).argsort()
    return NearPairs(first[order], second[order], similarities[order])


def _near_products(
    manifold: Manifold, points: Tensor, others: Tensor | None, threshold: float
) -> Iterator[tuple[Tensor, Tensor, float]]:
    """Candidates, and the share of all pairs that is looked at."""
    import faiss

    sides = [manifold.product_vectors(side) for side in (points, points if others is None else others)]
    longest = [float(side.norm(dim=1).max()) for side in sides]
    slack = 1.01 * (sides[0].shape[1] + 4) * 2.0**-23 * longest[0] * longest[1]
    done, whole = 0, len(points) * len(sides[1])
    for start in range(0, len(sides[1]), BLOCK_ROWS):
        index: Any = faiss.IndexFlatIP(sides[1].shape[1])
        index.add(sides[1][start : start + BLOCK_ROWS].numpy())
        stop = len(points) if others is not None else min(start + BLOCK_ROWS, len(points))
        for low in range(0, stop, BLOCK_ROWS):
            rows = sides[0][low : min(low + BLOCK_ROWS, stop)]
            limits, _, columns = index.range_search(rows.numpy(), threshold - slack)
            counts = torch.from_numpy(limits.astype("int64")).diff()
            first = torch.arange(len(counts)).repeat_interleave(counts) + low
            done += len(rows) * index.ntotal * (2 if others is None and low < start else 1)
            yield *_once(first, torch.from_numpy(columns) + start, others), done / whole


def _near_distances(
    manifold: Manifold, points: Tensor, others: Tensor | None, threshold: float
) -> Iterator[tuple[Tensor, Tensor, float]]:
    columns = points if others is None else others
    done, whole = 0, len(points) * len(columns)
    floor = threshold - 1e-5 * max(1.0, abs(threshold))  # float64 products round far less
    for low in range(0, len(points), DISTANCE_ROWS):
        rows = points[low : low + DISTANCE_ROWS].double()
        for start in range(low if others is None else 0, len(columns), DISTANCE_ROWS):
            near = manifold.similarity(rows, columns[start : start + DISTANCE_ROWS].double()) >= floor
            first, second = near.nonzero(as_tuple=True)
            done += near.numel() * (2 if others is None and low < start else 1)
            yield *_once(first + low, second + start, others), done / whole


def _once(first: Tensor, second: Tensor, others: Tensor | None) -> tuple[Tensor, Tensor]:
    """Of one side no point is paired with itself, and none twice."""
    if others is not None:
        return first, second
    kept = first < second
    return first[kept], second[kept]
