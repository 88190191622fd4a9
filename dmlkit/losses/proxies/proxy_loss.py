"""What losses over learnable proxies share: which classes a step computes, all of them or a part."""

from math import ceil
from typing import Annotated, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from dmlkit.distributed.class_shard import ClassShard
from dmlkit.losses.base import Loss
from dmlkit.losses.proxies.class_chunks import Pool, Walk, plan_walk
from dmlkit.manifolds.base import Manifold

NegativeFraction = Annotated[float, Field(gt=0, le=1)]


class Selection(NamedTuple):
    """The classes of a step.

    Args:
        walk: over their proxies.
        proxies: of this rank's (n, d) or (n, K, d).
        labels: (B,) where the own class of each row is among these; outside 0..n-1 where another rank has it.
        num_classes: of all ranks.
        chosen: (n,) which of this rank's proxies these are; None for all of them.
    """

    walk: Walk
    proxies: Tensor
    labels: Tensor
    num_classes: int
    chosen: Tensor | None = None

    def part(self, per_class: Tensor) -> Tensor:
        """Of a tensor (C_r, ...) with a row for each of this rank's classes, the rows of these (n, ...)."""
        return per_class if self.chosen is None else per_class[self.chosen]


class ProxyLoss(Loss):
    """A loss over learnable proxies whose classes may be shared out over ranks, or sampled.

    With ``negative_fraction`` < 1 a training step is the loss of a part of the classes: those in the batch, and
    others drawn anew each step until the part is complete (Partial FC: An et al., CVPR 2022, arXiv:2203.15565). In
    evaluation mode it is the loss of all.

    Args:
        manifold: the geometry of embeddings and proxies.
        num_classes: C.
        proxies_per_class: K, or None for proxies (C, d).
        pool: makes one similarity of K.
        chunk_size: how many classes to compute at a time; None chooses by size.
        negative_fraction: the part of the classes that a step computes, in (0, 1].

    Raises:
        ValueError: a fraction out of range.
    """

    proxies: nn.Parameter

    def __init__(
        self,
        manifold: Manifold,
        num_classes: int,
        *,
        proxies_per_class: int | None = None,
        pool: Pool | None = None,
        chunk_size: int | None = None,
        negative_fraction: float = 1.0,
    ) -> None:
        super().__init__(manifold, num_classes)
        if not 0 < negative_fraction <= 1:
            raise ValueError(f"{type(self).__name__}: expected negative_fraction in (0, 1], got {negative_fraction}")
        self.all_classes = num_classes
        self.pool, self.chunk_size, self.negative_fraction = pool, chunk_size, negative_fraction
        self.shard = ClassShard()
        self.proxies = manifold.new_proxies(num_classes, *(() if proxies_per_class is None else (proxies_per_class,)))

    def keep_shard(self, shard: ClassShard) -> None:
        """Keep the proxies of this rank's classes only; to be called once, before an optimizer is built.

        Raises:
            ValueError: there are fewer classes than ranks.
        """
        if self.all_classes < shard.ranks:
            raise ValueError(f"expected at least one class for each of {shard.ranks} ranks, got {self.all_classes}")
        self.shard = shard
        classes = shard.classes(self.all_classes)
        self.proxies.data = self.proxies.data[classes.start : classes.stop].clone()

    def select(self, embeddings: Tensor, labels: Tensor) -> Selection:
        """The classes of this step: all of this rank's, or the sampled ones."""
        own, proxies, num_classes = labels - self.shard.classes(self.all_classes).start, self.proxies, self.all_classes
        chosen = None
        if self.training and self.negative_fraction < 1:
            chosen = self.sample(own)
            positions = own.new_full((len(proxies) + 1,), -1)  # the last one stands for the classes of other ranks
            positions[chosen] = torch.arange(len(chosen), device=own.device)
            own = positions[own.where((own >= 0) & (own < len(proxies)), len(proxies))]
            proxies = proxies.index_select(0, chosen)
            num_classes = sum(
                self._sample_size(len(ClassShard(rank, self.shard.ranks).classes(self.all_classes)), len(labels))
                for rank in range(self.shard.ranks)
            )
        walk = plan_walk(self.manifold, embeddings, proxies, self.chunk_size, self.pool)
        return Selection(walk._replace(shard=self.shard), proxies, own, num_classes, chosen)

    def sample(self, own: Tensor) -> Tensor:
        """This rank's classes of a step, ascending: those in the batch and random others.

        Args:
            own: (B,) positions of the batch's classes among this rank's; outside where another rank has them.
        """
        count = len(self.proxies)
        score = torch.rand(count + 1, device=own.device)
        score[own.where((own >= 0) & (own < count), count)] = 2.0  # above every random number
        return score[:count].topk(self._sample_size(count, len(own)), sorted=False).indices.sort().values

    def _sample_size(self, count: int, batch: int) -> int:
        """Of ``count`` classes of a rank; at least as many as a batch may hold, so that it needs no look at them."""
        return max(ceil(self.negative_fraction * count - 1e-9), min(batch, count))
