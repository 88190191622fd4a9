"""For each query, the items of a gallery that share its key."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Lookup:
    """The gallery positions of each query's key, as slices of one sorted order.

    Args:
        order: (N,) int64, gallery positions sorted by key.
        start: (Q,) int64, where the slice of query q begins in ``order``.
        count: (Q,) int64, its length.
    """

    order: Tensor
    start: Tensor
    count: Tensor

    @classmethod
    def of(cls, queries: Tensor, gallery: Tensor) -> "Lookup":
        """Index int64 keys of queries (Q,) and gallery (N,).

        Example:
            >>> lookup = Lookup.of(torch.tensor([7, 5, 6]), torch.tensor([5, 7, 5]))
            >>> lookup.count.tolist()
            [1, 2, 0]
            >>> columns, present = lookup.columns(torch.tensor([1]))
            >>> columns[present].tolist()
            [0, 2]
        """
        keys, order = gallery.sort(stable=True)
        start = torch.searchsorted(keys, queries)
        return cls(order, start, torch.searchsorted(keys, queries, right=True) - start)

    def columns(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        """Gallery positions (n, J) of some queries (n,), padded to the longest, and which of them are present."""
        count = self.count[queries, None]
        offset = torch.arange(int(count.max()), device=count.device)  # (J,)
        present = offset < count
        place = (self.start[queries, None] + offset).clamp(max=len(self.order) - 1)
        return self.order[place], present
