"""Search on a CPU, row by row with NumPy, whose products, comparisons, counts and selections are vectorized."""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from threading import local
from typing import Any

import torch
from torch import Tensor

from dmlkit.metrics.ranking.search import Depth, Search, Standing, repeated_rows

BLOCK_ROWS = 512  # rows of products per thread: 124 MB at N = 60 502; 150 GFLOP/s on 2 cores, 96 with 64 rows
BLOCK_ENTRIES = 2**25
ALL_ENTRIES = 2**28  # products in all threads together: 1 GB in float32

# Ranking one more positive by comparing a row of 60 502 with it takes 44 us, for two comparisons of 22. Selecting the
# best 1 000 takes 133 us and sorting the row 426 us, and either ranks all positives.
SELECT_ABOVE = 3
SORT_ABOVE = 9


def standings(search: Search, blocks: Iterable[Tensor], depth: Depth) -> Iterator[Standing]:
    """Count for blocks of queries (n,); each block is split over as many threads as torch uses.

    Every thread computes its own products: a threaded BLAS would spin on the cores that the counting needs.
    """
    threads = torch.get_num_threads()
    rows = rows_of(len(search.gallery), threads)
    worker = _Worker(search, rows, depth)
    with thread_pools().limit(limits=1, user_api="blas"), ThreadPoolExecutor(threads) as pool:
        for block in blocks:
            width = int(search.positives.count[block].max())
            columns = [
                torch.cat(parts) for parts in zip(*pool.map(partial(worker, width), block.split(rows)), strict=True)
            ]
            yield Standing(*columns)


@cache
def thread_pools() -> Any:
    """Find the libraries with threads of their own, once: looking through all that are loaded takes 10 ms and more."""
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()


def rows_of(gallery: int, threads: int) -> int:
    """Return how many rows of products each thread keeps."""
    return max(1, min(BLOCK_ROWS, min(BLOCK_ENTRIES, ALL_ENTRIES // threads) // gallery))


class _Worker:
    def __init__(self, search: Search, rows: int, depth: Depth) -> None:
        self.search, self.rows, self.depth = search, rows, depth
        self.queries: Any = search.queries.numpy()
        self.gallery: Any = search.gallery.numpy()
        self.copies, self.originals = (tensor.numpy() for tensor in repeated_rows(search.gallery))
        self.thread = local()

    def __call__(self, width: int, block: Tensor) -> tuple[Tensor, ...]:
        """Compute the tensors of a `Standing` for queries (n,), padded to ``width`` positives."""
        import numpy as np

        products = self._products(block)
        hidden, present = (tensor.numpy() for tensor in self.search.excluded.columns(block))
        products[present.nonzero()[0], hidden[present]] = -np.inf
        nearest = products.argmax(1)
        columns, present = (tensor.numpy() for tensor in self.search.positives.columns(block))
        scores = np.full((len(block), width), -np.inf, products.dtype)
        scores[:, : columns.shape[1]] = np.where(present, np.take_along_axis(products, columns, 1), -np.inf)
        if self.search.levels is None:
            scores = -np.sort(-scores, 1)
        else:
            order = np.argsort(-scores, 1, kind="stable")
            scores = np.take_along_axis(scores, order, 1)
            columns = np.take_along_axis(np.pad(columns, ((0, 0), (0, width - columns.shape[1]))), order, 1)
        positives = (scores > -np.inf).sum(1)
        levels = [row[:count] for row, count in zip(scores, positives.tolist(), strict=True)]
        size = products.shape[1]
        above = np.full((len(block), 1 if self.depth.first_only else width), size)
        reached = above + 1
        depth = min(size, self.depth.of(int(positives.max())))
        if above.shape[1] <= (SELECT_ABOVE if 4 * depth < size else SORT_ABOVE):
            for row, row_levels in enumerate(levels):
                count_levels(products[row], row_levels[: above.shape[1]], depth, above[row], reached[row])
        else:
            select_levels(products, levels, depth, above, reached)
        arrays = (scores, above, reached, nearest, *(() if self.search.levels is None else (columns,)))
        return tuple(map(torch.from_numpy, arrays))

    def _products(self, block: Tensor) -> Any:
        import numpy as np

        if self.search.rows is not None:
            return self.search.rows(block).numpy()
        if not hasattr(self.thread, "products"):
            self.thread.products = np.empty((self.rows, len(self.gallery)), self.gallery.dtype)
        products = self.thread.products[: len(block)]
        np.dot(self.queries[block.numpy()], self.gallery.T, out=products)
        if len(self.copies):
            products[:, self.copies] = products[:, self.originals]
        return products


def count_levels(row: Any, levels: Any, depth: int, above: Any, reached: Any) -> None:
    """Count by comparison how many entries of a row are above each level, and how many reach it.

    Args:
        levels: (R,) entries of the row (N,) in descending order.
        depth: the counts of a level with ``depth`` or more entries above it, except the first level, may be left out.
        above, reached: (J,) int64, J >= R, receive the counts.
    """
    import numpy as np

    for j, level in enumerate(levels):
        higher = np.count_nonzero(row > level)
        if j and higher >= depth:
            return
        above[j] = higher
        reached[j] = np.count_nonzero(row >= level)


def select_levels(rows: Any, levels: list[Any], depth: int, above: Any, reached: Any) -> None:
    """Compute `count_levels` for many rows (n, N) by sorting their ``depth`` best entries; the rows are reordered."""
    size = rows.shape[1]
    if depth < size:
        rows.partition(size - depth, axis=1)
    best = rows[:, size - depth :]
    best.sort(axis=1)
    tied = (best[:, 1:] == best[:, :-1]).any(1)
    for i, row_levels in enumerate(levels):
        inside = row_levels[row_levels >= best[i, 0]]
        count = len(inside)
        above[i, :count] = depth - best[i].searchsorted(inside, "right")
        reached[i, :count] = depth - best[i].searchsorted(inside, "left") if tied[i] else above[i, :count] + 1
        if count == 0:
            count_levels(rows[i], row_levels[:1], depth, above[i], reached[i])
        elif inside[-1] == best[i, 0]:  # items tied with it may be among those that were not selected
            reached[i, :count][inside == best[i, 0]] = (rows[i] >= best[i, 0]).sum()
