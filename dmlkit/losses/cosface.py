"""CosFace loss: a softmax over cosines, with a margin subtracted from the cosine of the row's own class."""

from collections.abc import Iterable
from math import inf

from pydantic import NonNegativeFloat, PositiveFloat
from torch import Tensor

from dmlkit.component import Requirement
from dmlkit.losses.proxies.margins import MarginSoftmax
from dmlkit.losses.proxies.softmax import RowLosses, cross_entropy


class CosFace(MarginSoftmax, name="cosface"):
    r"""CosFace (Wang et al. 2018): cross-entropy of cosines, with a cosine margin on the own class.

    Wang et al., CVPR 2018 (arXiv:1801.09414), eq. 4.

    .. math:: \frac{1}{B} \sum_i -\log
        \frac{e^{s (\cos\theta_{y_i} - m)}}{e^{s (\cos\theta_{y_i} - m)} + \sum_{c \ne y_i} e^{s \cos\theta_c}}

    Raises:
        ValueError: the manifold's similarity is not a cosine.

    Example:
        >>> import torch
        >>> from dmlkit.manifolds import Sphere
        >>> loss = CosFace(Sphere(2), num_classes=2, scale=1.0, margin=1.0)
        >>> _ = loss.proxies.data.copy_(torch.eye(2))
        >>> round(loss(torch.tensor([[1.0, 0.0]]), torch.tensor([0])).item(), 4)  # the margin cancels the lead: log(2)
        0.6931
    """

    margin: NonNegativeFloat = 0.35
    """m, in units of the cosine."""
    margin_limit = inf
    scale: PositiveFloat = 64.0
    """s, inverse temperature."""

    def requirements(self) -> Iterable[Requirement]:
        yield from super().requirements()
        yield Requirement("manifold.similarity", ("cosine", "origin_cosine"), "its margin is a difference of cosines")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.logit_scale = self.scale

    def with_margin(self, others: Tensor, own_logits: Tensor, margin: float | Tensor) -> RowLosses:
        return cross_entropy(others, own_logits - self.scale * margin)
