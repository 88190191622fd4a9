"""Base of losses over learnable proxies: selects the classes of a step and combines blocks of similarities."""

from abc import abstractmethod
from collections.abc import Iterable
from math import ceil
from typing import Annotated, ClassVar

import torch
from pydantic import Field, PositiveFloat, PositiveInt
from torch import Tensor
from torch.nn import Parameter

from dmlkit.component import Requirement, option
from dmlkit.distributed.exchange import ClassShard, ShardedParameter
from dmlkit.losses.base import Loss
from dmlkit.losses.proxies.classes import Block, Classes, Terms, sum_over_classes
from dmlkit.losses.proxies.similarity import Pool, automatic_block_size, may_wait, similarity_to


class ProxyLoss(Loss):
    """A loss over proxies, computed in blocks of classes; see `ClassSumLoss` and `SoftmaxLoss`."""

    shares_classes: ClassVar[bool] = True
    has_proxies: ClassVar[bool] = True
    num_classes: int = option(kw_only=False)
    """C, the number of training classes."""
    chunk_size: PositiveInt | None = None
    """Number of classes computed at a time; null selects it automatically. The loss value does not depend on it."""
    negative_fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Fraction of the classes that a training step uses: the classes in the batch and random other classes, drawn again
    in each step (Partial FC: An et al., CVPR 2022, arXiv:2203.15565)."""
    proxy_norm: PositiveFloat = 1.0
    """Mean norm of the proxies' features before training. Short proxies turn faster: by the inverse of the norm with
    Adam, by that of its square with SGD."""
    proxies: Parameter = option(init=False)  # (C, d) or (C, K, d)
    shard: ClassShard = option(init=False)  # the classes of this rank
    pool: Pool | None = option(init=False)  # of similarities to the K proxies of a class

    def requirements(self) -> Iterable[Requirement]:
        if self.proxy_norm != 1:
            yield Requirement("manifold.proxies", ("features",), "loss.proxy_norm is the norm of features")

    def __post_init__(self, proxies_per_class: int | None = None, pool: Pool | None = None) -> None:
        """Create the proxies.

        Args:
            proxies_per_class: K, or None for proxies (C, d).
            pool: reduces similarities (B, K, w) to (B, w); None passes all K to the loss.
        """
        super().__post_init__()
        self.pool, self.shard = pool, ClassShard(self.num_classes)
        per_class = [] if proxies_per_class is None else [proxies_per_class]
        self.proxies = self.manifold.new_proxies(self.num_classes, *per_class)
        self.proxies.data.mul_(self.proxy_norm)

    @abstractmethod
    def over(self, classes: Classes) -> Tensor:
        """Compute the loss over the classes of a step."""

    def compute(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        return self.over(self.classes(embeddings, labels))

    def classes(self, embeddings: Tensor, labels: Tensor) -> Classes:
        """Return the classes of this step: all of this rank's, or a sample."""
        chosen, total = select(self.shard, labels, self.negative_fraction if self.training else 1)
        proxies = self.proxies if chosen is None else self.proxies.index_select(0, chosen)
        first = self.shard.classes.start
        own = labels - first if first else labels
        if embeddings.dtype != proxies.dtype:
            raise ValueError(
                f"{type(self).__name__}: these embeddings are computed in {embeddings.dtype}, but the proxies are "
                f"{proxies.dtype}; convert the loss: loss.to({embeddings.dtype})"
            )
        similarity = similarity_to(self.manifold, self.pool)  # not kept: a copy of the loss has a manifold of its own
        others = (tensor for tensor in self.parameters() if tensor is not self.proxies and tensor.requires_grad)
        return Classes(
            embeddings,
            proxies,
            own if chosen is None else positions_among(chosen, self.shard, labels),
            similarity,
            tuple(others),
            self.chunk_size or automatic_block_size(embeddings, proxies),
            total,
            all_labels=labels,
            shard=self.shard,
            keep=not self.chunk_size and may_wait(similarity, embeddings, proxies),
            chosen=chosen,
        )

    def keep_shard(self, rank: int, ranks: int) -> None:
        self.shard = ClassShard(self.shard.num_classes, rank, ranks)
        self.proxies.data = self.shard.own_rows(self.proxies.data)

    def sharded_parameters(self) -> list[ShardedParameter]:
        return [ShardedParameter("proxies", self.proxies, self.shard)] if self.shard.ranks > 1 else []


class ClassSumLoss(ProxyLoss):
    """A loss over proxies that is a sum of terms of the classes."""

    @abstractmethod
    def class_terms(self, block: Block) -> Terms:
        """Compute the terms (w,) of the classes of a block."""

    def over(self, classes: Classes) -> Tensor:
        return sum_over_classes(classes, self.class_terms)


def select(shard: ClassShard, labels: Tensor, fraction: float) -> tuple[Tensor | None, int]:
    """Choose the classes of a batch with labels (B,), and random others up to ``fraction`` of all classes.

    Returns:
        The ascending positions (n,) of the chosen among this rank's classes, or None for all, and the number of classes
        of the step, over all ranks.
    """
    if fraction == 1:
        return None, shard.num_classes
    counts = [len(shard.of(rank).classes) for rank in range(shard.ranks)]
    # at least the size of the batch, so that labels need not be read
    sizes = [max(ceil(fraction * count - 1e-9), min(len(labels), count)) for count in counts]
    score = torch.rand(len(shard.classes) + 1, device=labels.device)
    score[place_among(shard, labels)] = 2.0  # above every random number
    return score[:-1].topk(sizes[shard.rank], sorted=False).indices.sort().values, sum(sizes)


def place_among(shard: ClassShard, labels: Tensor) -> Tensor:
    """Return the places of labels (B,) among this rank's classes; the last one plus 1 if another rank has the class."""
    own = labels - shard.classes.start
    return own.where((own >= 0) & (own < len(shard.classes)), len(shard.classes))


def positions_among(chosen: Tensor, shard: ClassShard, labels: Tensor) -> Tensor:
    """Return the positions of labels (B,) among the chosen (n,) of this rank's classes; -1 if on another rank."""
    positions = labels.new_full((len(shard.classes) + 1,), -1)  # the last one represents the classes of other ranks
    positions[chosen] = torch.arange(len(chosen), device=labels.device)
    return positions[place_among(shard, labels)]


def require_all(classes: Classes, reason: str) -> None:
    """Reject a step that samples the classes or splits them over ranks."""
    if classes.shard.ranks > 1 or classes.chosen is not None:
        raise ValueError(f"the classes can neither be sampled nor split over ranks, because {reason}")
