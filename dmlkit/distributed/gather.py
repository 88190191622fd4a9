"""Gathering of rows and lists from all ranks."""

from typing import Any

import torch
from torch import Tensor

from dmlkit.distributed.launch import Ranks


class GatherRows(torch.autograd.Function):
    """Gathering of the rows of all ranks, in rank order, with gradient.

    Every rank computes the same loss of the same global batch, so the gradient of its own rows is already complete.
    It is multiplied by the number of ranks, because data-parallel training averages over ranks.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, fabric: Ranks, counts: list[int]) -> Tensor:
        """Gather the rows; they are padded to the largest count, because all ranks must send equally many."""
        start, longest = sum(counts[: fabric.global_rank]), max(counts)
        ctx.own, ctx.ranks = slice(start, start + len(rows)), len(counts)
        sent = torch.cat([rows, rows.new_zeros(longest - len(rows), *rows.shape[1:])])
        gathered = rows.new_empty(len(counts) * longest, *rows.shape[1:])
        torch.distributed.all_gather_into_tensor(gathered, sent)
        if min(counts) == longest:
            return gathered
        return torch.cat([own[:count] for own, count in zip(gathered.split(longest), counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of this rank's rows."""
        return gradients[0][ctx.own] * ctx.ranks, None, None


def gather_rows(fabric: Ranks, rows: Tensor, counts: list[int] | None = None) -> Tensor:
    """Gather the rows of all ranks with gradient; with one rank, return the rows.

    Args:
        fabric: fabric that connects the ranks.
        rows: (B, ...) rows of this rank.
        counts: B of each rank; None if B is equal on all ranks.
    """
    apply: Any = GatherRows.apply  # untyped in torch
    return rows if fabric.world_size == 1 else apply(rows, fabric, counts or [len(rows)] * fabric.world_size)


def gather_counts(fabric: Ranks, count: int, *, differ: bool) -> list[int]:
    """Return the count of each rank; ranks communicate only if counts may differ, since that synchronizes a GPU."""
    if fabric.world_size == 1 or not differ:
        return [count] * fabric.world_size
    return gather_rows(fabric, torch.tensor([count], device=fabric.device)).tolist()


def gather_lists(fabric: Ranks, items: list[str]) -> list[str]:
    """Gather the items of all ranks, in rank order."""
    if fabric.world_size == 1:
        return items
    of_ranks: list[Any] = [None] * fabric.world_size
    torch.distributed.all_gather_object(of_ranks, items)
    return [item for own in of_ranks for item in own]
