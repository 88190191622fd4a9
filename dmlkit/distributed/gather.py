"""Rows and lists of all ranks, brought together."""

from typing import Any

import torch
from lightning_fabric import Fabric
from torch import Tensor


class GatherRows(torch.autograd.Function):
    """The rows (B, D) of all ranks, in rank order: (ranks * B, D), with gradient.

    Every rank computes the same loss of the same global batch, so the gradient of its own rows is complete
    already; it is multiplied by the number of ranks because data-parallel training averages over them.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, fabric: Fabric) -> Tensor:
        """Gather the rows."""
        ctx.rank, ctx.ranks, ctx.count = fabric.global_rank, fabric.world_size, len(rows)
        gathered = rows.new_empty(ctx.ranks * ctx.count, *rows.shape[1:])
        torch.distributed.all_gather_into_tensor(gathered, rows.contiguous())
        return gathered

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """The own rows' share of the gradient."""
        start = ctx.rank * ctx.count
        return gradients[0][start : start + ctx.count] * ctx.ranks, None


def gather_rows(fabric: Fabric, rows: Tensor) -> Tensor:
    """The rows of all ranks with gradient; the rows themselves where there is one rank."""
    apply: Any = GatherRows.apply  # untyped in torch
    return rows if fabric.world_size == 1 else apply(rows, fabric)


def gather_lists(fabric: Fabric, items: list[str]) -> list[str]:
    """The items of all ranks, in rank order."""
    if fabric.world_size == 1:
        return items
    of_ranks: list[Any] = [None] * fabric.world_size
    torch.distributed.all_gather_object(of_ranks, items)
    return [item for own in of_ranks for item in own]
