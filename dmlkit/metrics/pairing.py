"""Pairs of points and their similarities, computed block by block in bounded memory."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import local

import torch
from torch import Tensor

from dmlkit.manifolds.base import Manifold
from dmlkit.manifolds.products import inner_products_into
from dmlkit.metrics.base import Points
from dmlkit.metrics.ranking.cpu_search import thread_pools
from dmlkit.metrics.ranking.search import repeated_rows

BLOCK_ENTRIES = 2**24  # scores per thread: 64 MB; 277 rows of 60 502, whose product is as fast as that of more rows
ALL_ENTRIES = 2**26  # scores in all threads together
DISTANCE_ENTRIES = 2**21  # scores that need temporaries in float64: 16 MB each

Use = Callable[[Tensor, slice, slice], None]
"""Function of the scores (n, m) of some rows and columns, in which all but pairs of different classes are -inf. It is
called by several threads, each with its own scores, which it may modify."""


@dataclass(frozen=True)
class Pairing:
    """Pairs of rows and columns, both sorted by class.

    Without a gallery every point is a row and a column, and each unordered pair counts once: row i is paired with the
    columns after i, except those of its group. With a gallery every row is paired with every column except itself.
    Scores are similarities of the manifold in float32. They are computed in float64 and rounded for distances, which
    cancel near zero, and for repeated points, which must tie although a float32 product rounds equal entries
    differently.
    """

    rows: Tensor  # (N, D') points, or vectors whose inner product is the similarity
    columns: Tensor  # (M, D')
    row_labels: Tensor  # (N,) int64, ascending
    column_labels: Tensor  # (M,) int64, ascending
    start: Tensor  # (N,) int64, first column of each row's class
    end: Tensor  # (N,) int64, column after the last one of that class
    unordered: bool  # whether rows and columns are the same points
    ids: tuple[Tensor, Tensor] | None  # (N,) and (M,) int64: a row and a column of one id, image or group, are no pair
    manifold: Manifold | None  # whose similarity is computed; None stands for the inner product
    exact: bool  # whether to compute in float64 and round

    @classmethod
    def of(cls, points: Points) -> "Pairing":
        """Build all pairs of points, or of points and their gallery."""
        sides, targets = [points.embeddings], points.targets
        labels = [points.labels]
        if targets is not None:
            sides.append(targets.embeddings)
            labels = [targets.point_labels, targets.labels]
        manifold = points.manifold
        is_computed = manifold.similarity_name.endswith("distance")
        if not is_computed:
            sides = [manifold.product_vectors(side) for side in sides]
        is_double = sides[0].dtype == torch.float64
        exact = is_computed or is_double or any(len(repeated_rows(side.contiguous())[0]) > 0 for side in sides)
        device = points.embeddings.device
        orders = [side.to(device).argsort(stable=True) for side in labels]
        ordered = [side.to(device)[order] for side, order in zip(labels, orders, strict=True)]
        vectors = [side[order].contiguous() for side, order in zip(sides, orders, strict=True)]
        if targets is not None:
            ids = targets.point_ids.to(device)[orders[0]], targets.ids.to(device)[orders[1]]
        else:
            ids = _hidden_pairs(points.groups, orders[0])
        return cls(
            vectors[0],
            vectors[-1],
            ordered[0],
            ordered[-1],
            torch.searchsorted(ordered[-1], ordered[0]),
            torch.searchsorted(ordered[-1], ordered[0], right=True),
            targets is None,
            ids,
            manifold if is_computed else None,
            exact,
        )

    @classmethod
    def of_table(cls, scores: Tensor, labels: Tensor, groups: Tensor | None = None) -> "Pairing":
        """Build all pairs of N points, given their scores (N, N), which are symmetric, labels (N,) and groups (N,)."""
        order = labels.argsort(stable=True)
        ordered, size = labels[order], len(labels)
        return cls(
            torch.eye(size, dtype=torch.float64),  # row i of the table is the product of unit vector i and its columns
            scores.double()[order][:, order].contiguous(),
            ordered,
            ordered,
            torch.searchsorted(ordered, ordered),
            torch.searchsorted(ordered, ordered, right=True),
            unordered=True,
            ids=_hidden_pairs(groups, order),
            manifold=None,
            exact=True,
        )

    @property
    def same(self) -> int:
        """Number of pairs of the same class."""
        paired = int((self.end - self.start).sum())
        return (paired - self._hidden(same=True)) // (1 + self.unordered)

    @property
    def different(self) -> int:
        """Number of pairs of different classes."""
        paired = int((len(self.columns) - (self.end - self.start)).sum())
        return (paired - self._hidden(same=False)) // (1 + self.unordered)

    def _hidden(self, *, same: bool) -> int:
        """Return how many rows and columns, of the same class or of different ones, are no pairs by their ids."""
        if self.ids is None:
            return len(self.rows) if self.unordered and same else 0
        both, sizes = torch.cat(self.ids), (len(self.rows), len(self.columns))
        labels = torch.cat([self.row_labels, self.column_labels])
        equal = [_equal_rows(keys, sizes) for keys in (torch.stack([both, labels], 1), both[:, None])]
        return equal[0] if same else equal[1] - equal[0]

    def scores(self, rows: Tensor, columns: Tensor, out: Tensor | None = None) -> Tensor:
        """Compute the similarity of some rows (n, D') and columns (m, D'), in float32, (n, m)."""
        if self.exact:
            x, y = rows.double(), columns.double()
            return (x @ y.T if self.manifold is None else self.manifold.similarity(x, y)).float()
        return inner_products_into(rows, columns, rows.new_empty(len(rows), len(columns)) if out is None else out)

    def same_scores(self) -> Iterator[Tensor]:
        """Yield the scores of all pairs of the same class in blocks (n,)."""
        sizes = self.row_labels.unique_consecutive(return_counts=True)[1]
        lasts = sizes.cumsum(0)
        with thread_pools().limit(limits=1):  # the products are small: with 2 threads they take 20 times as long
            for first, last in zip((lasts - sizes).tolist(), lasts.tolist(), strict=True):
                start, end = int(self.start[first]), int(self.end[first])
                step = max(1, DISTANCE_ENTRIES // max(1, end - start))
                for low in range(first, last, step):
                    high = min(low + step, last)
                    scores = self.scores(self.rows[low:high], self.columns[start:end])
                    is_pair = torch.ones_like(scores, dtype=torch.bool)
                    if self.unordered:
                        is_pair = is_pair.triu(low - start + 1)
                    if self.ids is not None:
                        is_pair &= self.ids[0][low:high, None] != self.ids[1][start:end]
                    yield scores[is_pair]

    def each_block(self, use: Use) -> None:
        """Call ``use`` with all scores of pairs of different classes, on a CPU in as many threads as torch uses."""
        if self.manifold is not None or self.rows.device.type != "cpu":
            for rows, columns in self._blocks(DISTANCE_ENTRIES if self.manifold is not None else BLOCK_ENTRIES):
                use(self._different(rows, columns, None), rows, columns)
            return
        threads, memory = torch.get_num_threads(), local()
        entries = min(BLOCK_ENTRIES, ALL_ENTRIES // threads) // (2 if self.exact else 1)

        @torch.no_grad()
        def work(block: tuple[slice, slice]) -> None:
            rows, columns = block
            shape = rows.stop - rows.start, columns.stop - columns.start
            if not hasattr(memory, "scores"):
                memory.scores = torch.empty(max(entries, len(self.columns)))
            use(self._different(*block, memory.scores[: shape[0] * shape[1]].view(shape)), *block)

        # every thread computes its own products: a threaded BLAS would spin on the cores that the sorting needs
        with thread_pools().limit(limits=1, user_api="blas"), ThreadPoolExecutor(threads) as pool:
            for _ in pool.map(work, self._blocks(entries)):
                pass

    def _blocks(self, entries: int) -> Iterator[tuple[slice, slice]]:
        """Yield blocks of rows with the columns that they may be paired with."""
        low = 0
        while low < len(self.rows):
            columns = slice(low if self.unordered else 0, len(self.columns))
            high = min(low + max(1, entries // (columns.stop - columns.start)), len(self.rows))
            yield slice(low, high), columns
            low = high

    def _different(self, rows: slice, columns: slice, out: Tensor | None) -> Tensor:
        scores = self.scores(self.rows[rows], self.columns[columns], out)
        first = columns.start
        starts = torch.zeros_like(self.start[rows]) if self.unordered else self.start[rows]
        for row, start, end in zip(scores, starts.tolist(), (self.end[rows] - first).tolist(), strict=True):
            row[start:end] = -torch.inf
        if self.ids is not None:
            scores.masked_fill_(self.ids[0][rows, None] == self.ids[1][columns], -torch.inf)
        return scores


def _equal_rows(keys: Tensor, sizes: tuple[int, int]) -> int:
    """Count the pairs of equal rows of keys (N + M, k), one of the first N rows and one of the last M; sizes N, M."""
    codes = keys.unique(dim=0, return_inverse=True)[1]
    first, second = (part.bincount(minlength=int(codes.max()) + 1) for part in codes.split(sizes))
    return int((first * second).sum())


def _hidden_pairs(groups: Tensor | None, order: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the groups (N,) of rows and columns in an order; None if no two points share one, which takes longer."""
    if groups is None or len(groups.unique()) == len(groups):
        return None
    groups = groups.to(order.device)[order]
    return groups, groups
