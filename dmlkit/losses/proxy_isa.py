"""Proxy-ISA loss: Proxy-Anchor that listens to informative samples, by what each class has learned so far."""

from collections.abc import Iterable
from math import exp
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor

from dmlkit.component import Requirement
from dmlkit.losses.checks.similarity import NEEDS_BOUNDED, require_bounded
from dmlkit.losses.proxies.class_memory import ClassMemory
from dmlkit.losses.proxies.classes import Block, Classes, sum_over_classes
from dmlkit.losses.proxies.closed_form import anchor_terms
from dmlkit.losses.proxies.proxy_loss import ProxyLoss, ProxyLossConfig
from dmlkit.losses.proxies.sample_weights import SampleWeights, own_and_below
from dmlkit.losses.proxies.similarity import log_one_plus_sum_exp
from dmlkit.manifolds.base import Manifold

PositivePenalty = Literal["none", "1/E", "v", "sigma"]
NegativePenalty = Literal["none", "1/E"]
MEMORY_EPOCH = 1  # embeddings are remembered from the second epoch on: before, they are too scattered
FILTER_EPOCH = 2  # and one epoch later the outliers among the positives are filtered


class ProxyISAConfig(ProxyLossConfig, frozen=True):
    """Proxy-ISA (Li et al. 2022): Proxy-Anchor that weighs samples by how informative they are for their class."""

    name: Literal["proxy_isa"] = "proxy_isa"
    margin: NonNegativeFloat = 0.1
    """delta, in similarity units (cosine on the sphere)."""
    scale: PositiveFloat = 32.0
    """alpha, inverse temperature."""
    volume: Annotated[float, Field(ge=1)] = 100.0
    """V, samples that fill the space of a class."""
    hardness: PositiveFloat = 0.15
    """h, learned threshold / mean similarity."""
    sensitivity: PositiveFloat = 0.9
    """k, of the search length to the class's hardness."""
    search_margin: Annotated[float, Field(ge=0, le=1)] = 0.1
    """lambda, least search length, in similarity units."""
    delay: PositiveFloat = 1.5
    """tau, when the decay sets in, in samples."""
    positive_penalty: PositivePenalty = "sigma"
    """For w+; ``none`` is 1."""
    negative_penalty: NegativePenalty = "1/E"
    """For w-; ``none`` is 1."""
    memory_size: PositiveInt = 1024
    """T, embeddings remembered."""

    def requirements(self) -> Iterable[Requirement]:
        return (NEEDS_BOUNDED,)

    def build(self, manifold: Manifold, num_classes: int) -> "ProxyISA":
        return ProxyISA(manifold, num_classes, **self.options())


class ProxyISA(ProxyLoss):
    r"""Li et al., MM Asia 2022, eq. 8-17; s = relative similarity, C+ = classes in the batch.

    .. math:: \frac{1}{\sum_{c \in C^+} \bar\omega_c^+} \sum_{c \in C^+} \log(1 + \sum_{y_x = c}
            e^{\omega_{x,c}^+ \alpha (\delta - s(x,c))}) + \frac{1}{\sum_c \bar\omega_c^-} \sum_c \log(1 +
            \sum_{y_x \ne c} e^{\omega_{x,c}^- \alpha (\delta + s(x,c))})

    A class with n samples seen has E = (1 - b^n) / (1 - b), b = (V - 1) / V, v = 1 / (1 + log(1 + E)) and
    sigma = 1 + (1 + e^-tau) (v - 1) / (1 + e^(V - E - tau)). With a the mean similarity of the class's embeddings in
    memory to today's proxy, and eta = (1 + k (1 - h a)) v + lambda:

    - w+ is 1 + sigma for h a - eta <= s <= h a, else sigma; below that interval x is an outlier and not remembered;
    - w- is 1 / max(1, E) for s < h a - eta, else 1.

    The weights carry no gradient, and w-bar is their mean over the batch's own or other samples of a class. The
    memory opens with the second epoch, w+ and the outlier filter start with the third (`set_epoch`), w- with the
    memory, as in the paper's algorithm 1; all of it, the epoch too, is in the ``state_dict``. With all weights 1 this
    is Proxy-Anchor.

    D: n counts the samples of a class since the memory opened; the memory holds T = 1024 embeddings, which the paper
    does not print; a class with nothing in memory has weights 1, and w-bar- is 1 where a batch holds no other class.
    D: in the paper's Table 3, the penalty takes the place of sigma in w+, and "no penalty" is w+ = 1 throughout;
    1/E is 1 / max(1, E).

    Args:
        manifold: the geometry of embeddings and proxies.
        num_classes: C, one proxy each.
        margin: delta >= 0, in similarity units.
        scale: alpha > 0, inverse temperature.
        volume: V >= 1, in samples.
        hardness: h > 0.
        sensitivity: k > 0.
        search_margin: lambda in [0, 1], in similarity units.
        delay: tau > 0.
        positive_penalty: for w+: ``none``, ``1/E``, ``v`` or ``sigma``.
        negative_penalty: for w-: ``none`` or ``1/E``.
        memory_size: T, in embeddings.
        chunk_size: see `ProxyLoss`, as the next.
        negative_fraction: the fraction of the classes that a training step computes, in (0, 1].

    Raises:
        ValueError: see `Loss.forward`.

    Example:
        >>> from dmlkit.manifolds import Sphere
        >>> sphere = Sphere(8)
        >>> loss = ProxyISA(sphere, num_classes=5)
        >>> loss.set_epoch(1)
        >>> _ = loss(sphere.from_features(torch.randn(4, 8)), torch.arange(4))
        >>> loss.memory.seen.tolist()
        [1, 1, 1, 1, 0]
    """

    epoch: Tensor

    def __init__(
        self,
        manifold: Manifold,
        num_classes: int,
        *,
        margin: float = 0.1,
        scale: float = 32.0,
        volume: float = 100.0,
        hardness: float = 0.15,
        sensitivity: float = 0.9,
        search_margin: float = 0.1,
        delay: float = 1.5,
        positive_penalty: PositivePenalty = "sigma",
        negative_penalty: NegativePenalty = "1/E",
        memory_size: int = 1024,
        chunk_size: int | None = None,
        negative_fraction: float = 1.0,
    ) -> None:
        super().__init__(manifold, num_classes, chunk_size=chunk_size, negative_fraction=negative_fraction)
        require_bounded("ProxyISA", manifold)
        self.margin, self.scale = margin, scale
        self.volume, self.hardness, self.sensitivity = volume, hardness, sensitivity
        self.search_margin, self.delay = search_margin, delay
        self.positive_penalty, self.negative_penalty = positive_penalty, negative_penalty
        self.memory = ClassMemory(memory_size, manifold.point_dim, num_classes)
        self.register_buffer("epoch", torch.zeros((), dtype=torch.int64))
        self.known_epoch = 0  # the buffer's value, where the device cannot be asked without a stall
        self.register_load_state_dict_post_hook(_read_epoch)

    def set_epoch(self, epoch: int) -> None:
        """The memory opens with epoch 1, the filter of outliers starts with epoch 2; epochs count from 0."""
        self.epoch.fill_(epoch)
        self.known_epoch = epoch

    def class_terms(self, block: Block) -> Tensor:
        if self.closed_form:
            return anchor_terms(block, self.scale, self.margin)
        ones = torch.ones_like(block.similarity)
        return self._plain_terms(block, ones, ones, block.classes.in_batch, block.classes.total)

    def compute(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        classes = self.classes(embeddings, labels)
        if self.known_epoch < MEMORY_EPOCH:
            return self.over(classes)
        with torch.no_grad():
            weights = self._weights(classes, labels)

        def weighted_terms(block: Block) -> Tensor:
            others, pull, push = weights.of_others(block), 1 / weights.own_total, 1 / weights.others_total
            if self.closed_form:
                return anchor_terms(block, self.scale, self.margin, pull, push, weights.own, others)
            return self._plain_terms(block, weights.own[:, None], others, weights.own_total, weights.others_total)

        loss = sum_over_classes(classes, weighted_terms)
        if self.training:
            self.memory.remember(embeddings.detach(), labels, weights.clean)
        return loss

    def _plain_terms(
        self, block: Block, own: Tensor, others: Tensor, own_total: Tensor, others_total: Tensor | int
    ) -> Tensor:
        """Eq. 17 of a block with weights w+ (B, 1) or (B, w) and w- (B, w), divided by their sums over classes."""
        pull = log_one_plus_sum_exp(-self.scale * own * (block.similarity - self.margin), where=block.own)
        push = log_one_plus_sum_exp(self.scale * others * (block.similarity + self.margin), where=~block.own)
        return pull / own_total + push / others_total

    def _weights(self, classes: Classes, labels: Tensor) -> SampleWeights:
        """The weights of a batch with labels (B,) among all classes, from the memory as the batch before left it."""
        first = self.shard.classes.start
        average, known = self.memory.mean_similarity(self.manifold, self.proxies, first)
        seen = self.memory.seen[first : first + len(self.proxies)]
        if classes.chosen is not None:
            average, known, seen = (per_class[classes.chosen] for per_class in (average, known, seen))
        effective = self.effective_number(seen.to(average.dtype))
        learned = self.hardness * average  # eq. 10, (n,)
        bound = 1 / (1 + torch.log1p(effective))  # v of eq. 14
        length = (1 + self.sensitivity * (1 - learned)) * bound + self.search_margin  # eta of eq. 15
        outlier = torch.where(known, learned - length, -torch.inf)
        inverse = 1 / effective.clamp(min=1)
        own, below = own_and_below(classes, outlier)

        count = len(classes.proxies)
        has_class = (classes.labels >= 0) & (classes.labels < count)  # the others' classes are with other ranks
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
        own_weights, is_clean = self.shard.sum(torch.stack([own_weights, clean.to(own)]) * has_class)

        in_batch = own.new_zeros(self.shard.num_classes).index_add_(0, labels, torch.ones_like(own))
        others = len(labels) - own.new_zeros(count).index_add_(0, row, has_class.to(own))
        penalty = inverse if self.negative_penalty == "1/E" else torch.ones_like(inverse)
        return SampleWeights(
            own=own_weights,
            own_total=(own_weights / in_batch[labels]).sum(),
            others_total=self.shard.sum((1 + (penalty - 1) * below / others.clamp(min=1)).sum()),
            clean=is_clean > 0,
            outlier=outlier,
            penalty=penalty,
        )

    def effective_number(self, seen: Tensor) -> Tensor:
        """E of eq. 8: how much of a class's space n samples fill, at most V."""
        return self.volume * (1 - (1 - 1 / self.volume) ** seen)


def _read_epoch(module: ProxyISA, _: Any) -> None:
    module.known_epoch = int(module.epoch)
