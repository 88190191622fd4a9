"""Normalized softmax loss: cross-entropy over similarities to one learnable proxy per class."""

from pydantic import PositiveFloat

from dmlkit.losses.proxies.margins import WeightedSoftmax


class NormSoftmax(WeightedSoftmax, name="norm_softmax"):
    r"""Normalized softmax (Zhai & Wu 2019): cross-entropy with cosines to the proxies as logits.

    Zhai & Wu, BMVC 2019 (arXiv:1811.12649), eq. 3, with any similarity s in place of the cosine.

    .. math:: \frac{1}{B} \sum_i -\log \frac{e^{s(x_i, p_{y_i}) / \sigma}}{\sum_c e^{s(x_i, p_c) / \sigma}}

    Example:
        >>> import torch
        >>> from dmlkit.manifolds import Sphere
        >>> loss = NormSoftmax(Sphere(2), num_classes=2, temperature=1.0)
        >>> _ = loss.proxies.data.copy_(torch.eye(2))
        >>> round(loss(torch.tensor([[1.0, 0.0]]), torch.tensor([0])).item(), 4)  # log(1 + 1/e)
        0.3133
    """

    temperature: PositiveFloat = 0.05
    """sigma, in similarity units."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.logit_scale = 1 / self.temperature
