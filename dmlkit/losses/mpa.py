"""Multi-Proxies Anchor loss: Proxy-Anchor with several proxies per class."""

from typing import Literal

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor

from dmlkit.losses.anchor_terms import Anchors, number_of_classes_in
from dmlkit.losses.base import Loss, LossConfig
from dmlkit.losses.centers import Pooling, mean_center_distance, pool_centers
from dmlkit.losses.class_chunks import plan_walk
from dmlkit.losses.class_sum import sum_over_classes
from dmlkit.losses.transport_weights import TransportWeights, TransportWeightsConfig
from dmlkit.manifolds.base import Manifold


class MPAConfig(LossConfig, frozen=True):
    """Multi-Proxies Anchor (Saeki et al. 2022): Proxy-Anchor for classes with several local centers."""

    name: Literal["mpa"] = "mpa"
    proxies_per_class: PositiveInt = 10  # K; 10 on CUB and Cars, 2 on SOP
    class_similarity: Pooling = "softmax"  # of a point to the K proxies of a class
    margin: NonNegativeFloat = 0.1  # delta, in similarity units (cosine on the sphere)
    scale: PositiveFloat = 32.0  # alpha, inverse temperature
    gamma: PositiveFloat = 0.1  # temperature of the choice between the proxies of a class, in similarity units
    regularizer_weight: NonNegativeFloat = 0.2  # tau
    transport: TransportWeightsConfig | None = None  # weights (1 + x) from transport plans of grouplets
    chunk_size: PositiveInt | None = None  # classes computed at a time; None chooses by size

    def build(self, manifold: Manifold, num_classes: int) -> "MPA":
        transport = None if self.transport is None else self.transport.build()
        options = self.model_dump(exclude={"name", "transport"})
        return MPA(manifold, num_classes, transport=transport, **options)


class MPA(Loss):
    r"""Saeki et al. 2022 (arXiv:2110.03997), eq. 1, 3, 6 and 7, with any similarity s and distance d.

    .. math:: S(x, c) &= \sum_k \frac{e^{s(x, w_{ck}) / \gamma}}{\sum_l e^{s(x, w_{cl}) / \gamma}} s(x, w_{ck}) \\
        L &= \frac{1}{|C^+|} \sum_{c \in C^+} \log(1 + \sum_{y_x = c} e^{-\alpha (S(x, c) - \delta)})
            + \frac{1}{C} \sum_c \log(1 + \sum_{y_x \ne c} e^{\alpha (S(x, c) + \delta)})
            + \frac{\tau}{C K (K - 1)} \sum_c \sum_{s < t} d(w_{cs}, w_{ct})

    With K = 1 it is Proxy-Anchor. D: alpha, which the paper does not print, is Proxy-Anchor's 32. D: the second mean
    is over all classes, as in Proxy-Anchor, also where a batch holds a single class. On the sphere d is
    sqrt(2 - 2 <w, w'>), here with a gradient that is finite at w = w'.

    Args:
        manifold: the geometry of embeddings and proxies.
        num_classes: C.
        proxies_per_class: K >= 1; with one proxy there is no regularizer.
        class_similarity: S from the K similarities: ``softmax`` as above, ``max`` or ``mean``.
        margin: delta >= 0, in similarity units.
        scale: alpha > 0, inverse temperature.
        gamma: > 0, temperature of the softmax between the proxies of a class, in similarity units.
        regularizer_weight: tau >= 0, how much the distances between the proxies of a class count.
        transport: weights (1 + x_ij) from the transport plans x of random grouplets, as in `Grouplet`; none if None.
        chunk_size: how many classes to compute at a time; None chooses by size. The value does not depend on it.

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
        class_similarity: Pooling = "softmax",
        margin: float = 0.1,
        scale: float = 32.0,
        gamma: float = 0.1,
        regularizer_weight: float = 0.2,
        transport: TransportWeights | None = None,
        chunk_size: int | None = None,
    ) -> None:
        super().__init__(manifold, num_classes)
        self.margin, self.scale = margin, scale
        self.regularizer_weight, self.chunk_size = regularizer_weight, chunk_size
        self.pool = pool_centers(class_similarity, gamma)
        self.transport = transport
        self.proxies = manifold.new_proxies(num_classes, proxies_per_class)  # (C, K, d)

    def compute(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        walk = plan_walk(self.manifold, embeddings, self.proxies, self.chunk_size, self.pool)
        present = number_of_classes_in(labels, len(self.proxies), like=embeddings)
        anchors = Anchors(labels, self.scale, self.margin, 1 / present, present.new_full((), 1 / len(self.proxies)))
        loss = sum_over_classes(walk, anchors.score, embeddings, self.proxies)
        if self.transport is not None:
            loss = loss + self.transport(walk, embeddings, self.proxies, anchors)
        if self.regularizer_weight == 0 or self.proxies.shape[1] == 1:
            return loss
        return loss + self.regularizer_weight * mean_center_distance(self.manifold, self.proxies)
