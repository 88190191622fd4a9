"""Proxy-ISA loss: Proxy-Anchor with more weight on samples that are informative for what a class has yet to learn."""

from collections.abc import Iterable
from typing import Any, Literal

import torch
from pydantic import NonNegativeFloat, PositiveFloat
from torch import Tensor

from dmlkit.component import Requirement
from dmlkit.losses.base import NEEDS_BOUNDED, require_bounded
from dmlkit.losses.proxies.classes import Block, Terms, anchor_terms, computed_once, sum_over_classes
from dmlkit.losses.proxies.informative import (
    InformativeConfig,
    InformativeWeights,
    NegativePenalty,
    PositivePenalty,
)
from dmlkit.losses.proxies.proxy_loss import ClassSumLoss, ProxyLossConfig
from dmlkit.losses.proxies.similarity import log_one_plus_sum_exp
from dmlkit.manifolds.base import Manifold


class ProxyISAConfig(InformativeConfig, ProxyLossConfig, frozen=True):
    """Proxy-ISA (Li et al. 2022): Proxy-Anchor that weights samples by how informative they are for their class."""

    name: Literal["proxy_isa"] = "proxy_isa"
    margin: NonNegativeFloat = 0.1
    """delta, in similarity units (cosine on the sphere)."""
    scale: PositiveFloat = 32.0
    """alpha, inverse temperature."""

    def requirements(self) -> Iterable[Requirement]:
        return (NEEDS_BOUNDED,)

    def build(self, manifold: Manifold, num_classes: int) -> "ProxyISA":
        return ProxyISA(manifold, num_classes, **self.options())


class ProxyISA(ClassSumLoss):
    r"""Li et al., MM Asia 2022, eq. 8-17; s = relative similarity, C+ = classes in the batch.

    .. math:: \frac{1}{\sum_{c \in C^+} \bar\omega_c^+} \sum_{c \in C^+} \log(1 + \sum_{y_x = c}
            e^{\omega_{x,c}^+ \alpha (\delta - s(x,c))}) + \frac{1}{\sum_c \bar\omega_c^-} \sum_c \log(1 +
            \sum_{y_x \ne c} e^{\omega_{x,c}^- \alpha (\delta + s(x,c))})

    The weights have no gradient, and w-bar is their mean over the batch's own or other samples of a class.
    `InformativeWeights` defines them; if all are 1, this is Proxy-Anchor. D: w-bar- is 1 if a batch contains no other
    class.

    Args:
        manifold: the geometry of embeddings and proxies.
        num_classes: C; each class has one proxy.
        margin: delta >= 0, in similarity units.
        scale: alpha > 0, inverse temperature.
        volume: V >= 1, in samples.
        hardness: h > 0.
        sensitivity: k > 0.
        search_margin: lambda in [0, 1], in similarity units.
        delay: tau > 0.
        positive_penalty: for w+: ``none``, ``1/E``, ``v`` or ``sigma``.
        negative_penalty: for w-: ``none`` or ``1/E``.
        memory_size: minimum of T, in embeddings.
        memory_per_class: T / C, if that makes T larger.
        chunk_size: see `ProxyLoss`.
        negative_fraction: the fraction of the classes that a training step computes, in (0, 1].

    Raises:
        ValueError: see `Loss.forward`.

    Example:
        >>> from dmlkit.manifolds import Sphere
        >>> sphere = Sphere(8)
        >>> loss = ProxyISA(sphere, num_classes=5)
        >>> loss.set_epoch(1)
        >>> _ = loss(sphere.from_features(torch.randn(4, 8)), torch.arange(4))
        >>> loss.informative.memory.seen.tolist()
        [1, 1, 1, 1, 0]
    """

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
        memory_per_class: float = 0.0,
        chunk_size: int | None = None,
        negative_fraction: float = 1.0,
    ) -> None:
        super().__init__(manifold, num_classes, chunk_size=chunk_size, negative_fraction=negative_fraction)
        require_bounded("ProxyISA", manifold)
        self.margin, self.scale = margin, scale
        self.informative = InformativeWeights(
            manifold.point_dim,
            num_classes,
            volume=volume,
            hardness=hardness,
            sensitivity=sensitivity,
            search_margin=search_margin,
            delay=delay,
            positive_penalty=positive_penalty,
            negative_penalty=negative_penalty,
            memory_size=memory_size,
            memory_per_class=memory_per_class,
        )
        self.register_load_state_dict_pre_hook(_rename_old)

    def set_epoch(self, epoch: int) -> None:
        self.informative.set_epoch(epoch)

    def class_terms(self, block: Block) -> Terms:
        if self.closed_form:
            return anchor_terms(block, self.scale, self.margin)
        ones = torch.ones_like(block.similarity)
        return self._plain_terms(block, ones, ones, block.classes.in_batch, block.classes.total)

    def compute(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        classes = self.classes(embeddings, labels)
        if not self.informative.is_open:
            return self.over(classes)
        classes = computed_once(classes)
        weights = self.informative.weigh(classes)

        def weighted_terms(block: Block) -> Terms:
            others, pull, push = weights.of_others(block), 1 / weights.own_total, 1 / weights.others_total
            if self.closed_form:
                return anchor_terms(block, self.scale, self.margin, pull, push, weights.own, others)
            return self._plain_terms(block, weights.own[:, None], others, weights.own_total, weights.others_total)

        loss = sum_over_classes(classes, weighted_terms)
        if self.training:
            self.informative.remember(embeddings, labels, weights.clean, self.manifold, self.proxies, self.shard)
        return loss

    def _plain_terms(
        self, block: Block, own: Tensor, others: Tensor, own_total: Tensor, others_total: Tensor | int
    ) -> Tensor:
        """Compute eq. 17 of a block with weights w+ (B, 1) or (B, w), w- (B, w), divided by their sums over classes."""
        pull = log_one_plus_sum_exp(-self.scale * own * (block.similarity - self.margin), where=block.own)
        push = log_one_plus_sum_exp(self.scale * others * (block.similarity + self.margin), where=~block.own)
        return pull / own_total + push / others_total


def _rename_old(_: ProxyISA, state: dict[str, Any], prefix: str, *__: Any) -> None:
    """Rename the keys of checkpoints of dmlkit 0.1.0, in which memory and epoch belong to the loss itself."""
    for key in [key for key in state if key.startswith((f"{prefix}memory.", f"{prefix}epoch"))]:
        state[f"{prefix}informative.{key.removeprefix(prefix)}"] = state.pop(key)
