"""ArcFace loss: a softmax over cosines, with a margin added to the angle of the row's own class, or sub-center."""

from collections.abc import Iterable
from functools import partial
from math import cos, pi, sin
from typing import Annotated, Any

import torch
from pydantic import Field, PositiveFloat, PositiveInt
from torch import Tensor

from dmlkit.component import Requirement
from dmlkit.losses.proxies.centers import pool_centers
from dmlkit.losses.proxies.margins import MarginSoftmax
from dmlkit.losses.proxies.softmax import RowLosses, cross_entropy


class ArcFace(MarginSoftmax, name="arcface"):
    r"""ArcFace (Deng et al. 2019): cross-entropy of cosines, with an angular margin on the own class.

    Deng et al., CVPR 2019 (arXiv:1801.07698), eq. 3.

    .. math:: \frac{1}{B} \sum_i -\log
        \frac{e^{s \cos(\theta_{y_i} + m)}}{e^{s \cos(\theta_{y_i} + m)} + \sum_{c \ne y_i} e^{s \cos\theta_c}}

    If theta + m exceeds pi, where cos(theta + m) would increase again, cos(theta) - m sin(m) replaces it.

    With K > 1 it is sub-center ArcFace (Deng et al., ECCV 2020, section 3.2): theta_c is the angle to the nearest of
    the K centers of class c, so that an image that is mislabeled or unlike its class does not pull the main center.

    .. math:: \cos\theta_{ic} = \max_{k = 1..K} \langle x_i, w_{ck} \rangle

    Raises:
        ValueError: the manifold's similarity is not a cosine.

    Example:
        >>> from dmlkit.manifolds import Sphere
        >>> loss = ArcFace(Sphere(2), num_classes=2, scale=1.0, margin=pi / 2)
        >>> _ = loss.proxies.data.copy_(torch.eye(2))
        >>> round(loss(torch.tensor([[1.0, 0.0]]), torch.tensor([0])).item(), 4)  # the margin cancels the lead: log(2)
        0.6931
    """

    margin: Annotated[float, Field(ge=0, lt=pi)] = 0.5
    """m, in radians."""
    margin_limit = pi
    scale: PositiveFloat = 64.0
    """s, inverse temperature."""
    centers_per_class: PositiveInt = 1
    """K, centers per class, of which the nearest one counts; 3 in the paper of sub-center ArcFace."""

    def requirements(self) -> Iterable[Requirement]:
        yield from super().requirements()
        yield Requirement("manifold.similarity", ("cosine", "origin_cosine"), "its margin is an angle")

    def __post_init__(self) -> None:
        per_class = self.centers_per_class if self.centers_per_class > 1 else None  # else (C, d), as in other losses
        super().__post_init__(per_class, partial(pool_centers, kind="max"))
        self.logit_scale = self.scale

    def with_margin(self, others: Tensor, own_logits: Tensor, margin: float | Tensor) -> RowLosses:
        turned, slope = turn(own_logits / self.scale, margin)
        rows = cross_entropy(others, self.scale * turned)
        return rows._replace(of_own=rows.of_own * slope)


def turn(cosine: Tensor, margin: float | Tensor) -> tuple[Tensor, Tensor]:
    """Return cos(theta + margin) given cos(theta), decreasing over [0, pi], and its derivative by cos(theta).

    The derivative is finite: the derivative of the sine counts as 0 at theta = 0 and pi.
    """
    if isinstance(margin, Tensor):
        of_margin: tuple[Any, Any] = margin.cos(), margin.sin()
    else:
        of_margin = cos(margin), sin(margin)
    turn_cosine, turn_sine = of_margin
    sine = (1 - cosine.square()).clamp_(min=0).sqrt_()
    slope = (cosine / sine).nan_to_num_(posinf=0, neginf=0).mul_(turn_sine).add_(turn_cosine)
    early = cosine >= -turn_cosine  # theta + margin <= pi
    turned = torch.where(early, cosine * turn_cosine - sine * turn_sine, cosine - margin * turn_sine)
    return turned, slope.where(early, 1)
