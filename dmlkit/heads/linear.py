"""Linear head: one affine map, followed by the manifold's own map from features to points."""

from typing import Literal

from torch import Tensor, nn

from dmlkit.heads.base import Head, HeadConfig
from dmlkit.manifolds.base import Manifold


class LinearConfig(HeadConfig, frozen=True):
    """One fully connected layer."""

    name: Literal["linear"] = "linear"
    bias: bool = True
    """Add a learnable bias."""

    def build(self, num_features: int, manifold: Manifold) -> "Linear":
        return Linear(num_features, manifold, bias=self.bias)


class Linear(Head):
    """Linear layer W h + b of the features h, followed by the manifold's map.

    Args:
        num_features: F, width of the backbone's features.
        manifold: the manifold of the points; its ``dim`` is the number of outputs.
        bias: whether to add b.

    Example:
        >>> import torch
        >>> from dmlkit.manifolds import Sphere
        >>> points = Linear(64, Sphere(16))(torch.randn(2, 64))
        >>> torch.allclose(points.norm(dim=1), torch.ones(2))
        True
    """

    def __init__(self, num_features: int, manifold: Manifold, *, bias: bool = True) -> None:
        super().__init__(manifold)
        self.linear = nn.Linear(num_features, manifold.dim, bias=bias)
        # Kaiming keeps the features' variance (torch's default: a third of it); Proxy-Anchor's code starts the same way
        nn.init.kaiming_normal_(self.linear.weight, mode="fan_out")
        if bias:
            nn.init.zeros_(self.linear.bias)

    def project(self, features: Tensor) -> Tensor:
        return self.linear(features)
