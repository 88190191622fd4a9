"""Exchange between ranks: gathered rows and lists, and the share of the classes that one rank holds."""

from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, distributed, nn

from dmlkit.distributed.launch import Ranks

T = TypeVar("T")


class GatherRows(torch.autograd.Function):
    """Gathering of the rows of all ranks, in rank order, with gradient.

    Every rank computes the same loss of the same global batch, so the gradient of its own rows is already complete.
    It is multiplied by the number of ranks, because data-parallel training averages over ranks.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, ranks: Ranks, counts: list[int]) -> Tensor:
        """Gather the rows; they are padded to the largest count, because all ranks must send equally many."""
        start, longest = sum(counts[: ranks.global_rank]), max(counts)
        ctx.own, ctx.ranks = slice(start, start + len(rows)), len(counts)
        sent = torch.cat([rows, rows.new_zeros(longest - len(rows), *rows.shape[1:])])
        gathered = rows.new_empty(len(counts) * longest, *rows.shape[1:])
        torch.distributed.all_gather_into_tensor(gathered, sent)
        if min(counts) == longest:
            return gathered
        return torch.cat([padded[:count] for padded, count in zip(gathered.split(longest), counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of this rank's rows."""
        return gradients[0][ctx.own] * ctx.ranks, None, None


def gather_rows(ranks: Ranks, rows: Tensor, counts: list[int] | None = None) -> Tensor:
    """Gather the rows of all ranks, by default equally many of each, with gradient; with one rank, return the rows."""
    apply: Any = GatherRows.apply  # untyped in torch
    return rows if ranks.world_size == 1 else apply(rows, ranks, counts or [len(rows)] * ranks.world_size)


def gather_counts(ranks: Ranks, count: int, *, differ: bool) -> list[int]:
    """Return the count of each rank; ranks communicate only if counts may differ, since that synchronizes a GPU."""
    if ranks.world_size == 1 or not differ:
        return [count] * ranks.world_size
    return gather_rows(ranks, torch.tensor([count], device=ranks.device)).tolist()


def gather_lists(ranks: Ranks, items: list[T]) -> list[T]:
    """Gather the items of all ranks, in rank order."""
    if ranks.world_size == 1:
        return items
    of_ranks: list[Any] = [None] * ranks.world_size
    torch.distributed.all_gather_object(of_ranks, items)
    return [item for of_rank in of_ranks for item in of_rank]


class ClassShard(NamedTuple):
    """Share of the classes whose proxies one rank holds; every rank sees the complete batch.

    Combined results are equal on all ranks. With one rank nothing is sent.

    Example:
        >>> [ClassShard(10, rank, 3).classes for rank in range(3)]
        [range(0, 3), range(3, 6), range(6, 10)]
    """

    num_classes: int
    rank: int = 0
    ranks: int = 1

    @property
    def classes(self) -> range:
        """Classes of this rank."""
        return range(self.rank * self.num_classes // self.ranks, (self.rank + 1) * self.num_classes // self.ranks)

    def of(self, rank: int) -> "ClassShard":
        """Return the share of another rank."""
        return self._replace(rank=rank)

    def sum(self, values: Tensor) -> Tensor:
        """Sum over ranks, in place."""
        if self.ranks > 1:
            distributed.all_reduce(values)
        return values

    def maximum(self, values: Tensor) -> Tensor:
        """Compute the maximum over ranks, in place."""
        if self.ranks > 1:
            distributed.all_reduce(values, distributed.ReduceOp.MAX)
        return values

    def logsumexp(self, values: Tensor) -> Tensor:
        """Compute log of the sum over ranks of exp(values)."""
        if self.ranks == 1:
            return values
        of_ranks = [torch.empty_like(values) for _ in range(self.ranks)]
        distributed.all_gather(of_ranks, values)
        return torch.stack(of_ranks).logsumexp(0)

    def collect(self, rows: Tensor) -> Tensor:
        """Collect the rows of all classes (C, ...) on the CPU of the first rank; other ranks get an empty tensor.

        A device holds the rows of at most one other rank at a time.
        """
        if self.ranks == 1:
            return rows
        of_ranks: list[Tensor] = []
        for rank in range(self.ranks):
            count = len(self.of(rank).classes)
            of_rank = rows.detach().contiguous() if rank == self.rank else rows.new_empty(count, *rows.shape[1:])
            distributed.broadcast(of_rank, rank)
            of_ranks += [of_rank.cpu()] if self.rank == 0 else []
        return torch.cat(of_ranks) if of_ranks else rows.new_empty(0)

    def own_rows(self, whole: Tensor) -> Tensor:
        """Return a copy of this rank's rows of (C, ...); a view would keep all rows in memory."""
        if self.num_classes < self.ranks:
            raise ValueError(
                f"got {self.num_classes} classes for {self.ranks} ranks, expected at least one class per rank"
            )
        return whole[self.classes.start : self.classes.stop].clone()


class ShardedParameter(NamedTuple):
    """Parameter of which each rank holds the rows of its classes."""

    name: str  # name in the module's state dict
    values: nn.Parameter
    shard: ClassShard
