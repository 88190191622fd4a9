"""Input and output of a search: which gallery items are positives or the query itself, and the counts it returns."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class Lookup:
    """Gallery positions of each query's key, as slices of one sorted order."""

    order: Tensor  # (N,) int64, gallery positions sorted by key
    start: Tensor  # (Q,) int64, the start of the slice of query q in ``order``
    count: Tensor  # (Q,) int64, the length of the slice

    @classmethod
    def of(cls, queries: Tensor, gallery: Tensor) -> "Lookup":
        """Index int64 keys of queries (Q,) and gallery (N,)."""
        keys, order = gallery.sort(stable=True)
        start = torch.searchsorted(keys, queries)
        return cls(order, start, torch.searchsorted(keys, queries, right=True) - start)

    def columns(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gallery positions (n, J) of some queries (n,), padded to the longest, and which are present."""
        count = self.count[queries, None]
        offset = torch.arange(int(count.max()), device=count.device)  # (J,)
        present = offset < count
        position = (self.start[queries, None] + offset).clamp(max=len(self.order) - 1)
        return self.order[position], present


@dataclass(frozen=True)
class SharedLabels:
    """Gallery positions that share a label with each query, if items have several labels."""

    queries: Tensor  # (Q,) int64, set of labels of each query
    gallery: Tensor  # (N,) int64, set of labels of each item
    members: Tensor  # (C, L) float32, 1 for the labels that each set has
    count: Tensor  # (Q,) int64, number of positions

    @classmethod
    def of(cls, queries: Tensor, gallery: Tensor, members: Tensor) -> "SharedLabels":
        """Count the items that share a label with each query."""
        members = members.float()  # once, not at each search
        sizes = torch.bincount(gallery, minlength=len(members)).double()
        of_set = torch.cat([share_label(block, members).double() @ sizes for block in members.split(2**10)])
        return cls(queries, gallery, members, of_set.long()[queries])

    def columns(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gallery positions (n, J) of some queries (n,), padded to the longest, and which are present."""
        is_shared = share_label(self.members[self.queries[queries]], self.members)[:, self.gallery]  # (n, N)
        count = self.count[queries]
        rows, positions = is_shared.nonzero(as_tuple=True)
        offset = torch.arange(len(rows), device=rows.device) - (count.cumsum(0) - count)[rows]
        present = torch.arange(int(count.max()), device=count.device) < count[:, None]
        columns = torch.zeros_like(present, dtype=torch.int64)
        columns[rows, offset] = positions
        return columns, present


def share_label(first: Tensor, second: Tensor) -> Tensor:
    """Return which of the rows (n, L) float, of 0 and 1, have a label in common with which of (m, L): (n, m) bool."""
    return first @ second.T > 0


@dataclass(frozen=True)
class Search:
    """Search of all queries in all of a gallery, which the inner products of the vectors order."""

    queries: Tensor  # (Q, D')
    gallery: Tensor  # (N, D')
    positives: Lookup | SharedLabels  # items with the label of each query, or with one of its labels
    excluded: Lookup  # items that are the query itself
    rows: Callable[[Tensor], Tensor] | None = None  # scores (n, N) of queries (n,), instead of inner products
    levels: tuple[Tensor, Tensor] | None = None  # classes (Q, L) and (N, L) in a hierarchy, coarsest first


@dataclass(frozen=True)
class Depth:
    """Depth down to which ranks must be known; the best positive is ranked at any depth."""

    fixed: int  # number of first items of every query
    to_r: bool  # whether the first R items are needed as well
    first_only: bool  # whether only the best positive is needed
    to_end: bool = False  # whether all positives are needed

    def of(self, positives: int) -> int:
        """Return the depth of a query with R = ``positives``."""
        if self.to_end:
            return sys.maxsize
        return max(self.fixed, positives if self.to_r else 0)


class Standing(NamedTuple):
    """Counts for n queries with up to R positives each."""

    scores: Tensor  # (n, R), scores of the positives in descending order; -inf where there is none
    above: Tensor  # (n, J) int64, J = 1 or R: items that score higher; N if unknown: below the depth, or no positive
    reached: Tensor  # (n, J) int64: items that score as high or higher; N + 1 if unknown
    nearest: Tensor  # (n,) int64, the item with the highest score
    columns: Tensor | None = None  # (n, R) int64, the positives in the order of ``scores``; None without a hierarchy


def repeated_rows(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Find the rows of (N, D) that repeat an earlier row, and the first row that each repeats.

    A matrix product may round equal columns differently (115 of 256 entries on OpenBLAS), so equal vectors tie only if
    their products are copied. Rows are distinguished by an integer hash; rows with the same hash are compared.
    """
    bits = torch.int32 if vectors.dtype == torch.float32 else torch.int64
    weights = torch.randint(-(2**62), 2**62, vectors.shape[1:], generator=torch.Generator().manual_seed(0))
    weights = weights.to(vectors.device)
    blocks = vectors.split(2**12)
    sums = torch.cat([((block + 0.0).view(bits) * weights).sum(1) for block in blocks])  # + 0.0: -0.0 equals 0.0
    _, group = sums.unique(return_inverse=True)
    rows = torch.arange(len(group), device=group.device)
    first = torch.full_like(group, len(group)).scatter_reduce(0, group, rows, "amin")
    original = first[group]
    repeats = (original != rows).nonzero()[:, 0]
    same = (vectors[repeats] == vectors[original[repeats]]).all(1)
    return repeats[same], original[repeats[same]]
