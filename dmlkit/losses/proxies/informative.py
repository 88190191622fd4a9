"""Proxy-ISA's weights and their state: how informative a sample is for a class, given what the class has learned."""

import warnings
from functools import cache
from math import ceil, exp
from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import AfterValidator, Field, NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor, nn

from dmlkit.component import Component, option
from dmlkit.distributed.exchange import ClassShard
from dmlkit.losses.proxies.classes import Block, Classes
from dmlkit.manifolds.base import Manifold

BLOCK = 64  # the similarities of T pairs come from T / BLOCK blocks of BLOCK x BLOCK pairs, not from all T x T


class ClassMemory(nn.Module):
    """A first-in, first-out queue of the last T embeddings with their labels, and statistics of each class.

    The statistics are the number of samples seen, and how near the embeddings in the memory were to the class's proxy
    when the class was last in a batch. All are buffers, so a checkpoint contains them; nothing waits for the device.

    Args:
        size: T >= 1.
        width: D, see `Manifold.to_memory`, which makes the embeddings.
        num_classes: C.

    Example:
        >>> memory = ClassMemory(size=3, width=1, num_classes=2)
        >>> memory.remember(torch.tensor([[1.0], [2.0]]), torch.tensor([0, 1]), torch.tensor([True, False]))
        >>> memory.labels.tolist(), memory.seen.tolist()
        ([0, -1, -1], [1, 1])
    """

    points: Tensor
    labels: Tensor
    pointer: Tensor
    seen: Tensor
    averages: Tensor

    def __init__(self, size: int, width: int, num_classes: int) -> None:
        super().__init__()
        self.register_buffer("points", torch.zeros(size, width))
        self.register_buffer("labels", torch.full((size,), -1))  # -1: empty
        self.register_buffer("pointer", torch.zeros((), dtype=torch.int64))  # the next slot to fill
        self.register_buffer("seen", torch.zeros(num_classes, dtype=torch.int64))  # n, per class
        self.register_buffer("averages", torch.full((num_classes,), torch.nan))  # S_avg of eq. 10; nan: not known yet

    def remember(self, points: Tensor, labels: Tensor, clean: Tensor) -> None:
        """Count a batch (B, D), (B,), and store its embeddings where ``clean`` (B,) is True; the last T are kept."""
        size = len(self.labels)
        self.seen.index_add_(0, labels, torch.ones_like(labels))
        rank = clean.cumsum(0) - 1  # position among the clean embeddings
        stays = clean & (rank >= clean.sum() - size)
        slots = torch.where(stays, (self.pointer + rank) % size, size)  # the others go to a slot that is cut off
        self.points.copy_(torch.cat([self.points, points[:1]]).index_copy_(0, slots, points)[:size])
        self.labels.copy_(torch.cat([self.labels, labels[:1]]).index_copy_(0, slots, labels)[:size])
        self.pointer.copy_((self.pointer + clean.sum()) % size)

    @torch.no_grad()
    def update_averages(self, manifold: Manifold, proxies: Tensor, labels: Tensor, shard: ClassShard) -> None:
        """Update the averages of the classes of a batch; a class without embeddings in the memory keeps its last one.

        ``proxies`` (n, d) and ``shard`` are those of this rank's classes. Every rank gets all averages, so that its
        checkpoint contains them.
        """
        first, count = shard.classes.start, len(proxies)
        stored = self.labels - first  # (T,)
        filled = (self.labels >= 0) & (stored >= 0) & (stored < count)
        stored = stored.clamp(0, count - 1)
        current = manifold.proxy_points(proxies[stored])  # (T, D)
        pairs = zip(manifold.from_memory(self.points).split(BLOCK), current.split(BLOCK), strict=True)
        similarity = torch.cat([manifold.relative_similarity(x, p).diagonal() for x, p in pairs])
        totals = similarity.new_zeros(count).index_add_(0, stored, torch.where(filled, similarity, 0))
        counts = similarity.new_zeros(count).index_add_(0, stored, filled.to(similarity.dtype))
        average, known = totals / counts.clamp(min=1), counts > 0  # (n,), S_avg of eq. 10
        own = labels - first
        inside, row = (own >= 0) & (own < count), own.clamp(0, count - 1)
        latest, is_known = shard.sum(torch.stack([average[row], known[row].to(average)]) * inside)
        self.averages.index_copy_(0, labels, torch.where(is_known > 0, latest, self.averages[labels]))


class SampleWeights(NamedTuple):
    """The weights w+ and w- of a batch, and the quantities they are computed from."""

    own: Tensor  # w+, (B,)
    own_total: Tensor  # sum over the classes of the batch of their mean w+
    others_total: Tensor  # sum over all classes of the step of their mean w-
    clean: Tensor  # (B,) bool, False for an outlier of its class
    outlier: Tensor  # h a - eta of this rank's classes (n,)
    penalty: Tensor  # w- below that threshold, (n,)

    def of_others(self, block: Block) -> Tensor:
        """Return w- (B, w) of a block."""
        similarity = block.similarity.detach()
        classes = slice(block.first, block.first + similarity.shape[1])
        return torch.where(similarity < self.outlier[classes], self.penalty[classes], 1)


def own_and_below(classes: Classes, threshold: Tensor) -> tuple[Tensor, Tensor]:
    """Return the similarity of each row to its class (B,), and how many other rows are below the thresholds (n,)."""
    own = classes.embeddings.new_zeros(len(classes.embeddings), 1)
    below: list[Tensor] = []
    for block in classes.blocks():
        own = torch.where(block.inside, block.similarity.gather(1, block.column), own)
        is_below = block.similarity < threshold[block.first : block.first + block.similarity.shape[1]]
        below.append((is_below & ~block.is_own).sum(0))
    return own[:, 0], torch.cat(below)


PositivePenalty = Literal["none", "1/E", "v", "sigma"]
NegativePenalty = Literal["none", "1/E"]
MEMORY_EPOCH = 1  # the memory starts with the second epoch: earlier embeddings are too scattered
FILTER_EPOCH = 2  # one epoch later, outliers among the positives are filtered


@cache
def warn_if_constant(volume: float) -> float:
    """Warn, once per process, that weights do not change with V = 1: E is 1 for any number of samples.

    Runs with this value exist, so it is not an error. Both a recipe and its loss call this.
    """
    if volume == 1:
        warnings.warn(
            "loss.volume: 1 keeps the weights of Proxy-ISA constant over time, so this is not the paper's method; use "
            "a value above 1, e.g. a twentieth of the samples of a class that the run sees (images x epochs)",
            stacklevel=1,
        )
    return volume


class InformativeOptions(Component):
    """Weights of samples by how informative they are for their class (Li et al. 2022)."""

    volume: Annotated[float, Field(ge=1), AfterValidator(warn_if_constant)] = 100.0
    """V, number of samples that fill the space of a class."""
    hardness: PositiveFloat = 0.15
    """h, the ratio of the learned threshold to the mean similarity."""
    sensitivity: PositiveFloat = 0.9
    """k, sensitivity of the search length to the hardness of the class."""
    search_margin: Annotated[float, Field(ge=0, le=1)] = 0.1
    """lambda, minimum search length, in similarity units."""
    delay: PositiveFloat = 1.5
    """tau, the delay of the decay, in samples."""
    positive_penalty: PositivePenalty = "sigma"
    """Penalty in w+; with ``none``, w+ is 1."""
    negative_penalty: NegativePenalty = "1/E"
    """Penalty in w-; with ``none``, w- is 1."""
    memory_size: PositiveInt = 1024
    """Minimum of T, the number of embeddings in the memory."""
    memory_per_class: NonNegativeFloat = 0.0
    """Number of embeddings in the memory per class; used if this makes the memory larger than ``memory_size``."""

    def weights(self, width: int, num_classes: int) -> "InformativeWeights":
        """Return the weights with these options for C classes and a memory of D numbers per embedding."""
        options = {key: getattr(self, key) for key in InformativeOptions.options_by_key}
        return InformativeWeights(width, num_classes, **options)


class InformativeWeights(InformativeOptions, nn.Module):
    r"""The weights w+ and w- of Li et al., MM Asia 2022, eq. 8-16, with the memory and thresholds they depend on.

    A class of which n samples were seen has E = (1 - b^n) / (1 - b), b = (V - 1) / V, v = 1 / (1 + log(1 + E)) and
    sigma = 1 + (1 + e^-tau) (v - 1) / (1 + e^(V - E - tau)). Let a be the mean similarity of the class's embeddings in
    the memory to its proxy, and eta = (1 + k (1 - h a)) v + lambda. Then:

    - w+ is 1 + sigma for h a - eta <= s <= h a, else sigma; below that interval x is an outlier and not stored;
    - w- is 1 / max(1, E) for s < h a - eta, else 1.

    As in the paper's algorithm 1, a is updated once per step for the classes of its batch: here when the loss has used
    its weights, before the optimizer's step. A class without embeddings in the memory keeps its last a. The memory
    starts with the second epoch, w+ and the outlier filter with the third, w- with the memory. The whole state,
    including the epoch, is in the ``state_dict``.

    The paper does not specify the following. n counts the samples of a class since the memory started. The memory
    holds T = 1024 embeddings by default. A class that has never had an embedding in the memory has weights 1. In the
    paper's Table 3, the penalty replaces sigma in w+, and "no penalty" means w+ = 1 throughout; 1/E is 1 / max(1, E).

    Example:
        >>> InformativeWeights(8, 5000, memory_per_class=1.5).memory.labels.shape
        torch.Size([7500])
    """

    width: int = option(kw_only=False)
    """D, numbers of an embedding in the memory, see `Manifold.memory_dim`."""
    num_classes: int = option(kw_only=False)
    """C, number of classes."""
    epoch: Tensor = option(init=False)

    def __post_init__(self) -> None:
        size = max(self.memory_size, ceil(self.memory_per_class * self.num_classes))
        self.memory = ClassMemory(size, self.width, self.num_classes)
        self.register_buffer("epoch", torch.zeros((), dtype=torch.int64))
        self.known_epoch = 0  # a copy of the buffer: reading the device would stall it
        self.register_load_state_dict_post_hook(_read_epoch)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, counted from 0: the memory starts with epoch 1, the outlier filter with epoch 2."""
        self.epoch.fill_(epoch)
        self.known_epoch = epoch

    @property
    def is_open(self) -> bool:
        """Whether the memory is in use, so that there are weights."""
        return self.known_epoch >= MEMORY_EPOCH

    def remember(
        self, embeddings: Tensor, labels: Tensor, clean: Tensor, manifold: Manifold, proxies: Tensor, shard: ClassShard
    ) -> None:
        """Store the clean embeddings of a step and update the thresholds of its classes; call it after `weigh`.

        Args:
            proxies: (n, d), the proxies of this rank's classes.
        """
        self.memory.remember(manifold.to_memory(embeddings), labels, clean)
        self.memory.update_averages(manifold, proxies.detach(), labels, shard)

    @torch.no_grad()
    def weigh(self, classes: Classes) -> SampleWeights:
        """Compute the weights of a batch from the memory and thresholds after the previous batch."""
        first, labels = classes.shard.classes.start, classes.all_labels
        of_rank = slice(first, classes.shard.classes.stop)
        average, seen = self.memory.averages[of_rank], self.memory.seen[of_rank]
        if classes.chosen is not None:
            average, seen = average[classes.chosen], seen[classes.chosen]
        known = ~average.isnan()
        effective = self.effective_number(seen.to(average.dtype))
        learned = self.hardness * average  # eq. 10, (n,)
        bound = 1 / (1 + torch.log1p(effective))  # v of eq. 14
        length = (1 + self.sensitivity * (1 - learned)) * bound + self.search_margin  # eta of eq. 15
        outlier = torch.where(known, learned - length, -torch.inf)
        inverse = 1 / effective.clamp(min=1)
        own, below = own_and_below(classes, outlier)

        count = len(classes.proxies)
        has_class = (classes.labels >= 0) & (classes.labels < count)  # other ranks have the classes of the other rows
        row = classes.labels.clamp(0, count - 1)
        own_weights = torch.ones_like(own)
        clean = torch.ones_like(has_class)
        if self.known_epoch >= FILTER_EPOCH:
            clean = own >= outlier[row]
        if self.known_epoch >= FILTER_EPOCH and self.positive_penalty != "none":
            decay = 1 + (1 + exp(-self.delay)) * (bound - 1) * torch.sigmoid(effective + self.delay - self.volume)
            penalty = {"1/E": inverse, "v": bound, "sigma": decay}[self.positive_penalty][row]
            informative = clean & (own <= learned[row])
            own_weights = torch.where(known[row], penalty + informative, 1)  # eq. 16
        own_weights, is_clean = classes.shard.sum(torch.stack([own_weights, clean.to(own)]) * has_class)

        in_batch = own.new_zeros(classes.shard.num_classes).index_add_(0, labels, torch.ones_like(own))
        others = len(labels) - own.new_zeros(count).index_add_(0, row, has_class.to(own))
        penalty = inverse if self.negative_penalty == "1/E" else torch.ones_like(inverse)
        return SampleWeights(
            own=own_weights,
            own_total=(own_weights / in_batch[labels]).sum(),
            others_total=classes.shard.sum((1 + (penalty - 1) * below / others.clamp(min=1)).sum()),
            clean=is_clean > 0,
            outlier=outlier,
            penalty=penalty,
        )

    def effective_number(self, seen: Tensor) -> Tensor:
        """Return E of eq. 8: how much of a class's space n samples fill, at most V."""
        return self.volume * (1 - (1 - 1 / self.volume) ** seen)


def _read_epoch(module: InformativeWeights, _: Any) -> None:
    module.known_epoch = int(module.epoch)
