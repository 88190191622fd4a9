"""Lorentz-linear head: a linear layer on the hyperboloid, with a bias that translates its points."""

from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor, nn

from dmlkit.component import Requirement, option
from dmlkit.heads.base import Head
from dmlkit.manifolds.lorentz import Lorentz


class LorentzLinear(Head, name="lorentz_linear"):
    r"""Hyperboloid layer (HGCN, Chami et al. 2019): a linear map of tangent vectors and a parallel-transported bias.

    Linear layer on the hyperboloid: HypLinear in the code of Chami et al., NeurIPS 2019, section 4.2.

    .. math:: y = \exp_{z}(PT_{o \to z}(b)), \quad z = \exp_o(W h)

    The Grouplet paper compares it (Table 3, "Hyperboloid") with `MobiusLinear`, the same layer on the ball: with the
    same parameters both compute the same points. W h is clipped by the manifold, h is not. Without the bias the layer
    is a linear layer followed by an exponential map.

    Raises:
        ValueError: the manifold is not the hyperboloid.

    Example:
        >>> LorentzLinear(64, Lorentz(16))(torch.randn(2, 64)).shape
        torch.Size([2, 17])
    """

    has_bias: bool = option(default=True, alias="bias")
    """Add a learnable bias."""
    bias: nn.Parameter | None = option(init=False)  # a tangent vector at the origin, which starts at 0

    def requirements(self) -> Iterable[Requirement]:
        yield Requirement("manifold.name", ("lorentz",), "its bias is transported along geodesics of the hyperboloid")

    def __post_init__(self) -> None:
        if not isinstance(self.manifold, Lorentz):
            raise ValueError(f"LorentzLinear: expected the hyperboloid, got {type(self.manifold).__name__}")
        self.linear = nn.Linear(self.num_features, self.manifold.dim, bias=False)
        nn.init.kaiming_normal_(self.linear.weight, mode="fan_out")  # as in the linear head
        self.bias = nn.Parameter(torch.zeros(self.manifold.dim)) if self.has_bias else None

    def project(self, features: Tensor) -> Tensor:
        return self.linear(features)

    def to_points(self, projected: Tensor) -> Tensor:
        sheet = cast(Lorentz, self.manifold)
        points = sheet.from_features(projected)
        return points if self.bias is None else sheet.translate(points, self.bias)
