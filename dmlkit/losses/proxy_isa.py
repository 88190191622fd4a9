"""Proxy-ISA loss: Proxy-Anchor with more weight on samples that are informative for what a class has yet to learn."""

from torch import Tensor

from dmlkit.losses.proxies.classes import Block, Terms, computed_once, sum_over_classes
from dmlkit.losses.proxies.informative import InformativeOptions
from dmlkit.losses.proxy_anchor import ProxyAnchor, anchor_terms


class ProxyISA(InformativeOptions, ProxyAnchor, name="proxy_isa"):
    r"""Proxy-ISA (Li et al. 2022): Proxy-Anchor that weights samples by how informative they are for their class.

    Li et al., MM Asia 2022, eq. 8-17; s = relative similarity, C+ = classes in the batch.

    .. math:: \frac{1}{\sum_{c \in C^+} \bar\omega_c^+} \sum_{c \in C^+} \log(1 + \sum_{y_x = c}
            e^{\omega_{x,c}^+ \alpha (\delta - s(x,c))}) + \frac{1}{\sum_c \bar\omega_c^-} \sum_c \log(1 +
            \sum_{y_x \ne c} e^{\omega_{x,c}^- \alpha (\delta + s(x,c))})

    The weights have no gradient, and w-bar is their mean over the batch's own or other samples of a class.
    `InformativeWeights` defines them; if all are 1, this is Proxy-Anchor. If a batch contains no other class, w-bar- is
    1.

    Example:
        >>> import torch
        >>> from dmlkit.manifolds import Sphere
        >>> sphere = Sphere(8)
        >>> loss = ProxyISA(sphere, num_classes=5)
        >>> loss.set_epoch(1)
        >>> _ = loss(sphere.from_features(torch.randn(4, 8)), torch.arange(4))
        >>> loss.informative.memory.seen.tolist()
        [1, 1, 1, 1, 0]
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.informative = self.weights(self.manifold.memory_dim, self.num_classes)

    def set_epoch(self, epoch: int) -> None:
        self.informative.set_epoch(epoch)

    def compute(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        classes = self.classes(embeddings, labels)
        if not self.informative.is_open:
            return self.over(classes)
        classes = computed_once(classes)
        weights = self.informative.weigh(classes)

        def weighted_terms(block: Block) -> Terms:
            others, pull, push = weights.of_others(block), 1 / weights.own_total, 1 / weights.others_total
            return anchor_terms(block, self.scale, self.margin, pull, push, weights.own, others)

        loss = sum_over_classes(classes, weighted_terms)
        if self.training:
            self.informative.remember(embeddings, labels, weights.clean, self.manifold, self.proxies, self.shard)
        return loss
