"""Multi-Proxies Anchor loss: Proxy-Anchor with several proxies per class."""

from collections.abc import Iterable
from typing import Literal

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor

from dmlkit.component import Requirement
from dmlkit.losses.base import NEEDS_BOUNDED, require_bounded
from dmlkit.losses.proxies.centers import CenterPooling, center_distances, pool_centers
from dmlkit.losses.proxies.classes import Block, Classes, ClosedForm, Terms, anchor_terms, with_gradient
from dmlkit.losses.proxies.proxy_loss import ClassSumLoss, ProxyLossConfig
from dmlkit.losses.proxies.similarity import log_one_plus_sum_exp
from dmlkit.losses.proxies.transport_weights import ALL_CLASSES, TransportWeights, TransportWeightsConfig
from dmlkit.manifolds.base import Manifold


class MPAConfig(ProxyLossConfig, frozen=True):
    """Multi-Proxies Anchor (Saeki et al. 2022): Proxy-Anchor for classes with several local centers."""

    name: Literal["mpa"] = "mpa"
    proxies_per_class: PositiveInt = 10
    """K, proxies per class; 10 on CUB and Cars, 2 on SOP."""
    class_similarity: CenterPooling = "softmax"
    """How the similarity of a point to a class is computed from those to its K proxies."""
    margin: NonNegativeFloat = 0.1
    """delta, in similarity units (cosine on the sphere)."""
    scale: PositiveFloat = 32.0
    """alpha, inverse temperature."""
    gamma: PositiveFloat = 0.1
    """Temperature of the softmax over the proxies of a class, in similarity units."""
    regularizer_weight: NonNegativeFloat = 0.2
    """tau, weight of the distances between the proxies of a class."""
    transport: TransportWeightsConfig | None = None
    """Weights (1 + x) from transport plans of grouplets; null for none."""

    def requirements(self) -> Iterable[Requirement]:
        return (NEEDS_BOUNDED,) if self.transport is None else (NEEDS_BOUNDED, *ALL_CLASSES)

    def build(self, manifold: Manifold, num_classes: int) -> "MPA":
        transport = None if self.transport is None else self.transport.build()
        return MPA(manifold, num_classes, transport=transport, **self.options("transport"))


class MPA(ClassSumLoss):
    r"""Saeki et al. 2022 (arXiv:2110.03997), eq. 1, 3, 6 and 7, with any similarity s and distance d.

    .. math:: S(x, c) &= \sum_k \frac{e^{s(x, w_{ck}) / \gamma}}{\sum_l e^{s(x, w_{cl}) / \gamma}} s(x, w_{ck}) \\
        L &= \frac{1}{|C^+|} \sum_{c \in C^+} \log(1 + \sum_{y_x = c} e^{-\alpha (S(x, c) - \delta)})
            + \frac{1}{C} \sum_c \log(1 + \sum_{y_x \ne c} e^{\alpha (S(x, c) + \delta)})
            + \frac{\tau}{C K (K - 1)} \sum_c \sum_{s < t} d(w_{cs}, w_{ct})

    With K = 1 it is Proxy-Anchor. D: the paper does not print alpha; the default is Proxy-Anchor's 32. D: the second
    mean is over all classes, as in Proxy-Anchor, even if the batch holds a single class. On the sphere d is
    sqrt(2 - 2 <w, w'>), here with a finite gradient at w = w'.

    Args:
        manifold: the geometry of embeddings and proxies.
        num_classes: C.
        proxies_per_class: K >= 1; K = 1 has no regularizer.
        class_similarity: how S is computed from the K similarities: ``softmax`` as above, ``max`` or ``mean``.
        margin: delta >= 0, in similarity units.
        scale: alpha > 0, inverse temperature.
        gamma: > 0, temperature of the softmax over the proxies of a class, in similarity units.
        regularizer_weight: tau >= 0, weight of the distances between the proxies of a class.
        transport: weights (1 + x_ij) from the transport plans x of random grouplets, as in `Grouplet`; None for none.
        chunk_size: see `ProxyLoss`.
        negative_fraction: the fraction of the classes that a training step computes, in (0, 1].

    Raises:
        ValueError: see `Loss.forward`.

    Example:
        >>> import torch
        >>> from dmlkit.manifolds import Sphere
        >>> sphere = Sphere(8)
        >>> loss = MPA(sphere, num_classes=5, proxies_per_class=2)
        >>> loss(sphere.from_features(torch.randn(4, 8)), torch.arange(4)).shape
        torch.Size([])
    """

    def __init__(
        self,
        manifold: Manifold,
        num_classes: int,
        *,
        proxies_per_class: int = 10,
        class_similarity: CenterPooling = "softmax",
        margin: float = 0.1,
        scale: float = 32.0,
        gamma: float = 0.1,
        regularizer_weight: float = 0.2,
        transport: TransportWeights | None = None,
        chunk_size: int | None = None,
        negative_fraction: float = 1.0,
    ) -> None:
        super().__init__(
            manifold,
            num_classes,
            proxies_per_class=proxies_per_class,
            pool=pool_centers(class_similarity, gamma),
            chunk_size=chunk_size,
            negative_fraction=negative_fraction,
        )
        require_bounded("MPA", manifold)
        self.margin, self.scale, self.transport = margin, scale, transport
        self.regularizer_weight = regularizer_weight

    def class_terms(self, block: Block) -> Terms:
        terms = self._anchor_terms(block)
        if self.regularizer_weight == 0 or block.proxies.shape[1] == 1:
            return terms
        terms = with_gradient(terms, block.similarity) if isinstance(terms, ClosedForm) else terms
        return terms + self.regularizer_weight * center_distances(self.manifold, block)

    def _anchor_terms(self, block: Block) -> Terms:
        if self.closed_form:
            return anchor_terms(block, self.scale, self.margin)
        pull = log_one_plus_sum_exp(-self.scale * (block.similarity - self.margin), where=block.own)
        push = log_one_plus_sum_exp(self.scale * (block.similarity + self.margin), where=~block.own)
        return pull / block.classes.in_batch + push / block.classes.total

    def over(self, classes: Classes) -> Tensor:
        loss = super().over(classes)
        return loss if self.transport is None else loss + self.transport(classes, self.scale, self.margin)
