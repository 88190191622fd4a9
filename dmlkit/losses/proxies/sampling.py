"""Which classes a step computes: all of a rank's, or the batch's own and random others."""

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor

from dmlkit.distributed.class_shard import ClassShard
from dmlkit.losses.proxies.classes import Classes
from dmlkit.losses.proxies.similarity import Measure, automatic_block_size, may_wait


class Selection(NamedTuple):
    """The n classes of a step that this rank computes."""

    labels: Tensor  # (B,) where the own class of each row is among them; outside 0..n-1 where another rank has it
    total: int  # classes of the step, over all ranks
    shard: ClassShard  # of this rank
    chosen: Tensor | None = None  # (n,) which of this rank's classes they are, ascending; None for all

    def of(self, per_class: Tensor) -> Tensor:
        """Of a tensor with a row for each of this rank's classes, the rows of these: (n, ...)."""
        return per_class if self.chosen is None else per_class.index_select(0, self.chosen)


def classes_of(
    selection: Selection,
    all_proxies: Tensor,
    embeddings: Tensor,
    labels: Tensor,
    measure: Measure,
    parameters: Sequence[Tensor],
    block_size: int | None,
) -> Classes:
    """A batch (B, D) with labels (B,) among all classes, held against the selected ones.

    Raises:
        ValueError: embeddings and proxies differ in dtype.
    """
    proxies = selection.of(all_proxies)
    if embeddings.dtype != proxies.dtype:
        raise ValueError(
            f"expected embeddings of the proxies' dtype {proxies.dtype}, got {embeddings.dtype}; "
            "convert the loss or the embeddings"
        )
    return Classes(
        embeddings,
        proxies,
        selection.labels,
        measure,
        tuple(parameters),
        block_size or automatic_block_size(embeddings, proxies),
        selection.total,
        all_labels=labels,
        shard=selection.shard,
        keep=not block_size and may_wait(measure, embeddings, proxies),
        chosen=selection.chosen,
    )


def select(shard: ClassShard, labels: Tensor, fraction: float) -> Selection:
    """The classes of a batch with labels (B,), and others drawn at random until ``fraction`` of all are chosen."""
    first = shard.classes.start
    own = labels - first if first else labels
    if fraction == 1:
        return Selection(own, shard.num_classes, shard)
    sizes = [sample_size(fraction, len(shard.of(rank).classes), len(labels)) for rank in range(shard.ranks)]
    chosen = sample_classes(own, len(shard.classes), sizes[shard.rank])
    return Selection(positions_among(chosen, own, len(shard.classes)), sum(sizes), shard, chosen)


def require_all(classes: Classes, reason: str) -> None:
    """Refuse a step that samples the classes, or shares them out.

    Raises:
        ValueError: with the reason.
    """
    if classes.shard.ranks > 1 or classes.chosen is not None:
        raise ValueError(f"cannot sample or share out the classes: {reason}")


def sample_size(fraction: float, count: int, batch: int) -> int:
    """Classes that a rank takes of its ``count``; at least as many as a batch may hold, so it needs no look at them.

    Example:
        >>> sample_size(0.25, 40, batch=6), sample_size(0.25, 40, batch=12)
        (10, 12)
    """
    return max(ceil(fraction * count - 1e-9), min(batch, count))


def sample_classes(own: Tensor, count: int, size: int) -> Tensor:
    """Classes (size,) of 0..count-1, ascending: those in the batch and random others.

    Args:
        own: (B,) the classes of the batch; outside 0..count-1 where another rank has them.
        count: classes to draw from.
        size: at least as many as occur in the batch.
    """
    score = torch.rand(count + 1, device=own.device)
    score[own.where((own >= 0) & (own < count), count)] = 2.0  # above every random number
    return score[:count].topk(size, sorted=False).indices.sort().values


def positions_among(chosen: Tensor, own: Tensor, count: int) -> Tensor:
    """Where the classes (B,) of a batch are among the chosen ones (n,) of ``count``; -1 where another rank has them.

    Example:
        >>> positions_among(torch.tensor([1, 4, 7]), torch.tensor([7, 1, 12]), 10).tolist()
        [2, 0, -1]
    """
    positions = own.new_full((count + 1,), -1)  # the last one stands for the classes of other ranks
    positions[chosen] = torch.arange(len(chosen), device=own.device)
    return positions[own.where((own >= 0) & (own < count), count)]
