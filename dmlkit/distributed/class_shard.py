"""The classes that one rank computes, and how the ranks put their parts together."""

from typing import NamedTuple

import torch
from torch import Tensor, distributed


class ClassShard(NamedTuple):
    """One of several ranks that each hold the proxies of some classes; every rank sees the whole batch.

    What is put together is the same on all ranks. With one rank nothing is sent.

    Example:
        >>> [ClassShard(rank, 3).classes(10) for rank in range(3)]
        [range(0, 3), range(3, 6), range(6, 10)]
    """

    rank: int = 0
    ranks: int = 1

    def classes(self, num_classes: int) -> range:
        """The classes of this rank, out of ``num_classes``."""
        return range(self.rank * num_classes // self.ranks, (self.rank + 1) * num_classes // self.ranks)

    def sum(self, part: Tensor) -> Tensor:
        """The sum over ranks, in place."""
        if self.ranks > 1:
            distributed.all_reduce(part)
        return part

    def maximum(self, part: Tensor) -> Tensor:
        """The largest over ranks, in place."""
        if self.ranks > 1:
            distributed.all_reduce(part, distributed.ReduceOp.MAX)
        return part

    def logsumexp(self, part: Tensor) -> Tensor:
        """log of the sum over ranks of exp(part)."""
        if self.ranks == 1:
            return part
        parts = [torch.empty_like(part) for _ in range(self.ranks)]
        distributed.all_gather(parts, part)
        return torch.stack(parts).logsumexp(0)

    def collect(self, rows: Tensor, num_classes: int) -> Tensor:
        """The rows of all classes (C, ...) on the CPU of the first rank, from each rank's own; elsewhere none of them.

        A device holds those of one more rank at a time, never all.
        """
        if self.ranks == 1:
            return rows
        parts: list[Tensor] = []
        for rank in range(self.ranks):
            count = len(ClassShard(rank, self.ranks).classes(num_classes))
            part = rows.detach().contiguous() if rank == self.rank else rows.new_empty(count, *rows.shape[1:])
            distributed.broadcast(part, rank)
            parts += [part.cpu()] if self.rank == 0 else []
        return torch.cat(parts) if parts else rows.new_empty(0)
