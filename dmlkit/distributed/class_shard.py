"""The classes that one rank holds, and how the ranks put theirs together."""

from typing import NamedTuple

import torch
from torch import Tensor, distributed, nn


class ClassShard(NamedTuple):
    """One of several ranks that each hold the proxies of some classes; every rank sees the whole batch.

    What is put together is the same on all ranks. With one rank nothing is sent.

    Args:
        num_classes: of all ranks.
        rank: this one.
        ranks: how many there are.

    Example:
        >>> [ClassShard(10, rank, 3).classes for rank in range(3)]
        [range(0, 3), range(3, 6), range(6, 10)]
    """

    num_classes: int
    rank: int = 0
    ranks: int = 1

    @property
    def classes(self) -> range:
        """The classes of this rank."""
        return range(self.rank * self.num_classes // self.ranks, (self.rank + 1) * self.num_classes // self.ranks)

    def of(self, rank: int) -> "ClassShard":
        """The share of another rank."""
        return self._replace(rank=rank)

    def sum(self, own: Tensor) -> Tensor:
        """The sum over ranks, in place."""
        if self.ranks > 1:
            distributed.all_reduce(own)
        return own

    def maximum(self, own: Tensor) -> Tensor:
        """The largest over ranks, in place."""
        if self.ranks > 1:
            distributed.all_reduce(own, distributed.ReduceOp.MAX)
        return own

    def logsumexp(self, own: Tensor) -> Tensor:
        """log of the sum over ranks of exp(own)."""
        if self.ranks == 1:
            return own
        of_ranks = [torch.empty_like(own) for _ in range(self.ranks)]
        distributed.all_gather(of_ranks, own)
        return torch.stack(of_ranks).logsumexp(0)

    def collect(self, rows: Tensor) -> Tensor:
        """The rows of all classes (C, ...) on the CPU of the first rank, from each rank's own; elsewhere none of them.

        A device holds those of one more rank at a time, never all.
        """
        if self.ranks == 1:
            return rows
        of_ranks: list[Tensor] = []
        for rank in range(self.ranks):
            count = len(self.of(rank).classes)
            own = rows.detach().contiguous() if rank == self.rank else rows.new_empty(count, *rows.shape[1:])
            distributed.broadcast(own, rank)
            of_ranks += [own.cpu()] if self.rank == 0 else []
        return torch.cat(of_ranks) if of_ranks else rows.new_empty(0)

    def own_rows(self, whole: Tensor) -> Tensor:
        """This rank's rows of (C, ...): a copy, for a view would keep all of them in memory.

        Raises:
            ValueError: there are fewer classes than ranks.
        """
        if self.num_classes < self.ranks:
            raise ValueError(f"expected at least one class for each of {self.ranks} ranks, got {self.num_classes}")
        return whole[self.classes.start : self.classes.stop].clone()


class ShardedParameter(NamedTuple):
    """A parameter of which each rank holds the rows of its classes."""

    name: str  # in the state dict of the module that was asked for it
    values: nn.Parameter
    shard: ClassShard
