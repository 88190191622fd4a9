"""ProxyNCA loss: neighborhood components analysis with one learnable proxy per class."""

from collections.abc import Iterable

import torch
from pydantic import PositiveFloat
from torch import Tensor

from dmlkit.component import Requirement
from dmlkit.losses.proxies.classes import Block
from dmlkit.losses.proxies.informative import InformativeOptions, InformativeWeights
from dmlkit.losses.proxies.softmax import RowLosses, SoftmaxLoss, mean_softmax_loss
from dmlkit.manifolds.base import NEEDS_BOUNDED


class ProxyNCA(SoftmaxLoss, name="proxy_nca"):
    r"""ProxyNCA (Movshovitz-Attias et al. 2017): a point prefers the proxy of its class to all others.

    Movshovitz-Attias et al., ICCV 2017 (arXiv:1703.07464), eq. 4, with a scale and any similarity s.

    .. math:: \frac{1}{B} \sum_i -\log \frac{e^{\sigma s(x_i, p_{y_i})}}{\sum_{c \in Z_i} e^{\sigma s(x_i, p_c)}}

    Z_i are all classes, or with ``positive_in_denominator=False`` (the paper's form, which has no lower bound) all
    classes except y_i. The paper has s = -|x - p|^2 on the sphere, that is 2 cos - 2, so sigma for the cosine is twice
    that for the squared distance. Here, a squared distance becomes the relative similarity 1 - |x - p|^2 / 2, the
    cosine. The default 18 corresponds to 9 in the authors' code, which multiplies unit vectors by 3.

    With ``informative``, the similarity of a point to its own proxy is multiplied by w+ in the exponents, and the
    similarities to other proxies by w-: the weights of Proxy-ISA "directly on Proxy-NCA" (Li et al. 2022, Figure 11b).
    The paper gives no details.

    Raises:
        ValueError: there is a single class and positive_in_denominator is False.

    Example:
        >>> import torch
        >>> from dmlkit.manifolds import Sphere
        >>> loss = ProxyNCA(Sphere(2), num_classes=2, scale=1.0)
        >>> _ = loss.proxies.data.copy_(torch.eye(2))
        >>> round(loss(torch.tensor([[1.0, 0.0]]), torch.tensor([0])).item(), 4)  # log(1 + 1/e)
        0.3133
    """

    scale: PositiveFloat = 18.0
    """Inverse temperature, in 1 / similarity."""
    positive_in_denominator: bool = True
    """Include the own class in the denominator; false uses negatives only, as printed in the paper."""
    informative: InformativeOptions | None = None
    """Weights of Proxy-ISA (its Figure 11b); null for none."""

    def requirements(self) -> Iterable[Requirement]:
        return (*super().requirements(), *([] if self.informative is None else [NEEDS_BOUNDED]))

    def __post_init__(self) -> None:
        super().__post_init__()
        self.logit_scale = self.scale
        if self.num_classes == 1 and not self.positive_in_denominator:
            raise ValueError("ProxyNCA: positive_in_denominator=False needs at least 2 classes, got 1")
        if self.informative is not None:
            self.informative = self.informative.weights(self.manifold.memory_dim, self.num_classes)

    def set_epoch(self, epoch: int) -> None:
        if isinstance(self.informative, InformativeWeights):
            self.informative.set_epoch(epoch)

    def compute(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        informative = self.informative
        if not isinstance(informative, InformativeWeights) or not informative.is_open:
            return super().compute(embeddings, labels)
        classes = self.classes(embeddings, labels)
        weights = informative.weigh(classes)

        def logits(block: Block) -> Tensor:
            return block.similarity * torch.where(block.is_own, weights.own[:, None], weights.of_others(block))

        loss = mean_softmax_loss(classes, self.row_losses, logits, self.logit_scale)
        if self.training:
            informative.remember(embeddings, labels, weights.clean, self.manifold, self.proxies, self.shard)
        return loss

    def row_losses(self, others: Tensor, own_logits: Tensor) -> RowLosses:
        if self.positive_in_denominator:
            return super().row_losses(others, own_logits)
        ones = torch.ones_like(own_logits)
        return RowLosses(others - own_logits, ones, -ones)
