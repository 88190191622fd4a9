"""Linear head: one affine map, followed by the manifold's own map from features to points."""

from torch import Tensor, nn

from dmlkit.heads.base import Head


class Linear(Head, name="linear"):
    """One fully connected layer.

    Linear layer W h + b of the features h, followed by the manifold's map.

    Example:
        >>> import torch
        >>> from dmlkit.manifolds import Sphere
        >>> points = Linear(64, Sphere(16))(torch.randn(2, 64))
        >>> torch.allclose(points.norm(dim=1), torch.ones(2))
        True
    """

    bias: bool = True
    """Add a learnable bias."""

    def __post_init__(self) -> None:
        self.linear = nn.Linear(self.num_features, self.manifold.dim, bias=self.bias)
        # Kaiming keeps the features' variance (torch's default: a third of it); Proxy-Anchor's code starts the same way
        nn.init.kaiming_normal_(self.linear.weight, mode="fan_out")
        if self.bias:
            nn.init.zeros_(self.linear.bias)

    def project(self, features: Tensor) -> Tensor:
        return self.linear(features)
