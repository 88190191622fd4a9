"""Distribution of queries over the ranks of a process group, and gathering of their values."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def share_of(rows: Tensor, group: Any) -> Tensor:
    """Return every world-size-th row, starting at this rank; all rows without a group."""
    return rows if group is None else rows[dist.get_rank(group) :: dist.get_world_size(group)]


def gather_interleaved(values: Tensor, total: int, group: Any) -> Tensor:
    """Gather values (n,) of each rank's rows in the order before `share_of`: (total,), equal on all ranks."""
    if group is None:
        return values
    world = dist.get_world_size(group)
    padded = values.new_zeros(-(-total // world))
    padded[: len(values)] = values
    shares = [torch.empty_like(padded) for _ in range(world)]
    dist.all_gather(shares, padded, group=group)
    return torch.stack(shares, 1).flatten()[:total]
