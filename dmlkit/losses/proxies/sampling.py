"""Selection of the classes that a step computes: all of a rank's, or those of the batch and random others."""

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

    labels: Tensor  # (B,), index of each row's own class among the n; outside 0..n-1 if another rank has it
    total: int  # number of classes of the step, over all ranks
    shard: ClassShard  # the classes of this rank
    chosen: Tensor | None = None  # (n,), ascending indices among this rank's classes; None for all

    def of(self, per_class: Tensor) -> Tensor:
        """Return the rows (n, ...) of the selected classes from a tensor with a row for each of this rank's classes."""
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
    """Return the selected classes for a batch (B, D) with labels (B,) among all classes.

    Raises:
        ValueError: embeddings and proxies have different dtypes.
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
    """Select the classes of a batch with labels (B,), and random others up to ``fraction`` of all classes."""
    first = shard.classes.start
    own = labels - first if first else labels
    if fraction == 1:
        return Selection(own, shard.num_classes, shard)
    sizes = [sample_size(fraction, len(shard.of(rank).classes), len(labels)) for rank in range(shard.ranks)]
    chosen = sample_classes(own, len(shard.classes), sizes[shard.rank])
    return Selection(positions_among(chosen, own, len(shard.classes)), sum(sizes), shard, chosen)


def require_all(classes: Classes, reason: str) -> None:
    """Reject a step that samples the classes or splits them over ranks.

    Raises:
        ValueError: the step does so; the message has the reason.
    """
    if classes.shard.ranks > 1 or classes.chosen is not None:
        raise ValueError(f"the classes can neither be sampled nor split over ranks, because {reason}")


def sample_size(fraction: float, count: int, batch: int) -> int:
    """Return how many of its ``count`` classes a rank takes: at least ``batch``, so that labels need not be read.

    Example:
        >>> sample_size(0.25, 40, batch=6), sample_size(0.25, 40, batch=12)
        (10, 12)
    """
    return max(ceil(fraction * count - 1e-9), min(batch, count))


def sample_classes(own: Tensor, count: int, size: int) -> Tensor:
    """Draw classes (size,) from 0..count-1, ascending: those in the batch and random others.

    Args:
        own: (B,), the classes of the batch; outside 0..count-1 if another rank has them.
        count: number of classes to draw from.
        size: number of classes to draw, at least as many as occur in the batch.
    """
    score = torch.rand(count + 1, device=own.device)
    score[own.where((own >= 0) & (own < count), count)] = 2.0  # above every random number
    return score[:count].topk(size, sorted=False).indices.sort().values


def positions_among(chosen: Tensor, own: Tensor, count: int) -> Tensor:
    """Return the positions of the batch's classes (B,) among the chosen (n,) of ``count``; -1 if on another rank.

    Example:
        >>> positions_among(torch.tensor([1, 4, 7]), torch.tensor([7, 1, 12]), 10).tolist()
        [2, 0, -1]
    """
    positions = own.new_full((count + 1,), -1)  # the last one represents the classes of other ranks
    positions[chosen] = torch.arange(len(chosen), device=own.device)
    return positions[own.where((own >= 0) & (own < count), count)]
