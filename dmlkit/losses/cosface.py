"""CosFace loss: a softmax over cosines, with a margin subtracted from the cosine of the row's own class."""

from collections.abc import Iterable

from pydantic import NonNegativeFloat, PositiveFloat
from torch import Tensor

from dmlkit.component import Requirement
from dmlkit.losses.proxies.softmax import RowLosses, SoftmaxLoss


class CosFace(SoftmaxLoss, name="cosface"):
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
    scale: PositiveFloat = 64.0
    """s, inverse temperature."""

    def requirements(self) -> Iterable[Requirement]:
        return (
            Requirement("manifold.similarity", ("cosine", "origin_cosine"), "its margin is a difference of cosines"),
        )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.logit_scale = self.scale

    def row_losses(self, others: Tensor, own: Tensor) -> RowLosses:
        return super().row_losses(others, own - self.scale * self.margin)
