"""Multi-Proxies Anchor loss: Proxy-Anchor with several proxies per class."""

import warnings
from collections.abc import Iterable
from functools import partial

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor

from dmlkit.component import Requirement
from dmlkit.losses.proxies.centers import CenterPooling, center_regularizer, pool_centers
from dmlkit.losses.proxies.classes import Block, Classes, ClosedForm
from dmlkit.losses.proxies.transport_weights import ALL_CLASSES, TransportWeights
from dmlkit.losses.proxy_anchor import ProxyAnchor, anchor_terms

GAMMA = 0.1


class MPA(ProxyAnchor, name="mpa"):
    r"""Multi-Proxies Anchor (Saeki et al. 2022): Proxy-Anchor for classes with several local centers.

    Saeki et al. 2022 (arXiv:2110.03997), eq. 1, 3, 6 and 7, with any similarity s and distance d.

    .. math:: S(x, c) &= \sum_k \frac{e^{s(x, w_{ck}) / \gamma}}{\sum_l e^{s(x, w_{cl}) / \gamma}} s(x, w_{ck}) \\
        L &= \frac{1}{|C^+|} \sum_{c \in C^+} \log(1 + \sum_{y_x = c} e^{-\alpha (S(x, c) - \delta)})
            + \frac{1}{C} \sum_c \log(1 + \sum_{y_x \ne c} e^{\alpha (S(x, c) + \delta)})
            + \frac{\tau}{C K (K - 1)} \sum_c \sum_{s < t} d(w_{cs}, w_{ct})

    With K = 1 this is Proxy-Anchor. The paper does not give alpha; the default is Proxy-Anchor's 32. As in
    Proxy-Anchor, the second mean is over all classes, even if the batch contains a single class. On the sphere d is
    sqrt(2 - 2 <w, w'>), here with a finite gradient at w = w'.

    Example:
        >>> import torch
        >>> from dmlkit.manifolds import Sphere
        >>> sphere = Sphere(8)
        >>> loss = MPA(sphere, num_classes=5, proxies_per_class=2)
        >>> loss(sphere.from_features(torch.randn(4, 8)), torch.arange(4)).shape
        torch.Size([])
    """

    proxies_per_class: PositiveInt = 10
    """K, proxies per class; 10 on CUB and Cars, 2 on SOP."""
    class_similarity: CenterPooling = "softmax"
    """How the similarity of a point to a class is computed from those to its K proxies."""
    gamma: PositiveFloat = GAMMA
    """Temperature of the softmax over the proxies of a class, in similarity units."""
    regularizer_weight: NonNegativeFloat = 0.2
    """tau, weight of the distances between the proxies of a class."""
    transport: TransportWeights | None = None
    """Weights (1 + x) from transport plans of grouplets; null for none."""

    def requirements(self) -> Iterable[Requirement]:
        return (*super().requirements(), *(() if self.transport is None else ALL_CLASSES))

    def __post_init__(self) -> None:
        if self.class_similarity != "softmax" and self.gamma != GAMMA:
            text = f"loss.gamma: {self.gamma:g} has no effect on class_similarity {self.class_similarity}; remove it"
            warnings.warn(text, stacklevel=2)
        pool = partial(pool_centers, kind=self.class_similarity, gamma=self.gamma)
        super().__post_init__(self.proxies_per_class, pool)

    def class_terms(self, block: Block) -> ClosedForm:
        terms = anchor_terms(block, self.scale, self.margin)
        if self.regularizer_weight == 0 or self.proxies_per_class == 1:
            return terms
        return terms._replace(of_proxies=center_regularizer(self.manifold, block, self.regularizer_weight))

    def over(self, classes: Classes) -> Tensor:
        loss = super().over(classes)
        return loss if self.transport is None else loss + self.transport(classes, self.scale, self.margin)
