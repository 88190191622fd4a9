"""Base of the losses with the terms of Proxy-Anchor, which weight the images of a batch by how hard they are."""

from collections.abc import Iterable

from pydantic import NonNegativeFloat, PositiveFloat
from torch import Tensor

from dmlkit.component import Requirement
from dmlkit.losses.base import NEEDS_BOUNDED, require_bounded
from dmlkit.losses.proxies.classes import Block, Classes, Terms, anchor_terms
from dmlkit.losses.proxies.proxy_loss import ClassSumLoss
from dmlkit.losses.proxies.similarity import Pool, log_one_plus_sum_exp
from dmlkit.losses.proxies.transport_weights import ALL_CLASSES, TransportWeights
from dmlkit.options import option


class AnchorLoss(ClassSumLoss):
    r"""A loss over proxies with the terms of Kim et al., CVPR 2020 (arXiv:2003.13911), eq. 4; s = relative similarity.

    .. math:: \frac{1}{|P^+|} \sum_{p \in P^+} \log(1 + \sum_{y_x = p} e^{-\alpha (s(x,p) - \delta)})
            + \frac{1}{|P|} \sum_{p \in P} \log(1 + \sum_{y_x \ne p} e^{\alpha (s(x,p) + \delta)})
    """

    margin: NonNegativeFloat = 0.1
    """delta, in similarity units (cosine on the sphere)."""
    scale: PositiveFloat = 32.0
    """alpha, inverse temperature."""
    transport: TransportWeights | None = option(default=None, init=False)

    def requirements(self) -> Iterable[Requirement]:
        return (NEEDS_BOUNDED,) if self.transport is None else (NEEDS_BOUNDED, *ALL_CLASSES)

    def __post_init__(self, proxies_per_class: int | None = None, pool: Pool | None = None) -> None:
        super().__post_init__(proxies_per_class, pool)
        require_bounded(type(self).__name__, self.manifold)

    def class_terms(self, block: Block) -> Terms:
        if self.closed_form:
            return anchor_terms(block, self.scale, self.margin)
        pull = log_one_plus_sum_exp(-self.scale * (block.similarity - self.margin), where=block.own)
        push = log_one_plus_sum_exp(self.scale * (block.similarity + self.margin), where=~block.own)
        return pull / block.classes.in_batch + push / block.classes.total

    def over(self, classes: Classes) -> Tensor:
        loss = super().over(classes)
        return loss if self.transport is None else loss + self.transport(classes, self.scale, self.margin)
