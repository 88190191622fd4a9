"""Heads: features to points on the manifold."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dmlkit.component import Component, ComponentConfig, Requirement, import_on_demand, option
from dmlkit.manifolds.base import Manifold
from dmlkit.manifolds.products import without_autocast

__all__ = ["Head", "HeadConfig", "Linear", "LorentzLinear", "MobiusLinear", "Neck", "NoHead"]


class HeadConfig(ComponentConfig, frozen=True):
    """Base class of all head configs."""

    has_neck: ClassVar[bool] = False
    """Whether losses may take the features before its last step; see `Neck`."""

    @abstractmethod
    def build(self, num_features: int, manifold: Manifold) -> "Head":
        """Build the head that maps ``num_features`` features to points on ``manifold``."""


class Head(Component, nn.Module, ABC, family=HeadConfig):
    """Base class of heads, which map features (B, F) to points (B, D) on the manifold.

    A head has two steps: `project` may run in half precision, and `to_points` always runs in at least float32,
    because a unit vector in bfloat16 is off by 4e-3.

    Raises:
        ValueError: the head requires another manifold.
    """

    gives_before: bool = option(default=False, init=False)
    """Whether the output in training mode is (B, 2 D): the points, then those of the features before the neck."""
    num_features: int = option(kw_only=False)
    """F, width of the backbone's features h."""
    manifold: Manifold = option(kw_only=False)
    """The manifold of the points; its ``dim`` is the number of outputs."""

    def __post_init__(self) -> None:
        for requirement in self.requirements():
            name = type(self.manifold).Config.model_fields["name"].default
            if requirement.key == "manifold.name" and name not in requirement.allowed:
                expected = " or ".join(map(str, requirement.allowed))
                text = f"expected the manifold {expected}, got {name}, because {requirement.reason}"
                raise ValueError(f"{type(self).__name__}: {text}")

    def forward(self, features: Tensor) -> Tensor:
        """Map features (B, F) to points (B, D)."""
        projected = self.project(features)
        with without_autocast(features):
            return self.to_points(projected.float() if projected.itemsize < 4 else projected)

    @abstractmethod
    def project(self, features: Tensor) -> Tensor:
        """Apply the step that may run in half precision: (B, F) -> (B, F')."""

    def to_points(self, projected: Tensor) -> Tensor:
        """Apply the step that runs in full precision: (B, F') -> (B, D)."""
        return self.manifold.from_features(projected)


class NoHead(Head, name="none"):
    """No layer: the points are those of the backbone's features themselves.

    Raises:
        ValueError: the backbone has another number of features than the embedding has dimensions.

    Example:
        >>> from dmlkit.manifolds import Euclidean
        >>> NoHead(2, Euclidean(2))(torch.tensor([[1.0, 2.0]]))
        tensor([[1., 2.]])
    """

    def __post_init__(self) -> None:
        if self.num_features != self.manifold.dim:
            raise ValueError(
                f"got {self.manifold.dim}, but the head none keeps the {self.num_features} features of the "
                f"backbone; set embedding_dim to {self.num_features}, or use the head linear (in a neck: head.head)"
            )

    def project(self, features: Tensor) -> Tensor:
        return features


class Linear(Head, name="linear"):
    """One fully connected layer.

    Linear layer W h + b of the features h, followed by the manifold's map.

    Example:
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


class Neck(Head, name="neck"):
    r"""BNNeck (Luo et al. 2019): batch norm without shift as the last step, for retrieval and a softmax over classes.

    Luo et al., CVPR workshops 2019 (arXiv:1903.07071), section 3.3; f = the features that the inner head gives.

    .. math:: f_{after} = \gamma \odot \frac{f - \mathrm{mean}}{\mathrm{std}}

    A softmax over classes separates by angle, a loss over distances by distance. So the paper gives the features
    before the neck to the triplet loss, here ``on: [after, before]`` of the loss ``sum``; every other loss and
    retrieval take those after it. In training, mean and variance are those of the batch, or of a rank's share of it.

    Example:
        >>> from dmlkit.manifolds import Euclidean
        >>> neck = Neck(1, Euclidean(1))
        >>> neck(torch.tensor([[1.0], [3.0]])).round(decimals=3).flatten().tolist()
        [-1.0, 1.0]
    """

    has_neck = True
    head: Head = NoHead.Config()
    """Layer before the batch norm; ``none`` takes the backbone's features, as in the paper."""

    def requirements(self) -> Iterable[Requirement]:
        reason = (
            "batch norm gives each coordinate the same variance, so all points of a curved space would lie about "
            "equally far from its origin"
        )
        yield Requirement("manifold.name", ("euclidean", "sphere"), reason)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.norm = nn.BatchNorm1d(self.manifold.dim)
        self.norm.bias.requires_grad_(False)

    def project(self, features: Tensor) -> Tensor:
        return self.head.project(features)

    def to_points(self, projected: Tensor) -> Tensor:
        points = self.head.to_points(self.norm(projected))
        if not (self.training and self.gives_before):
            return points
        return torch.cat([points, self.head.to_points(projected)], 1)


class _HyperbolicLinear(Head):
    """A linear layer on tangent vectors at the origin, followed by a translation of the points."""

    manifold: Any = option(kw_only=False)
    """`Lorentz` or `Poincare`."""
    has_bias: bool = option(default=True, alias="bias")
    """Add a learnable bias."""
    bias: nn.Parameter | None = option(init=False)  # a tangent vector at the origin, which starts at 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.linear = nn.Linear(self.num_features, self.manifold.dim, bias=False)
        nn.init.kaiming_normal_(self.linear.weight, mode="fan_out")  # as in the linear head
        self.bias = nn.Parameter(torch.zeros(self.manifold.dim)) if self.has_bias else None

    def project(self, features: Tensor) -> Tensor:
        return self.linear(features)

    def to_points(self, projected: Tensor) -> Tensor:
        points = self.manifold.from_features(projected)
        return points if self.bias is None else self.manifold.translate(points, self.bias)


class LorentzLinear(_HyperbolicLinear, name="lorentz_linear"):
    r"""Hyperboloid layer (HGCN, Chami et al. 2019): a linear map of tangent vectors and a parallel-transported bias.

    Linear layer on the hyperboloid: HypLinear in the code of Chami et al., NeurIPS 2019, section 4.2.

    .. math:: y = \exp_{z}(PT_{o \to z}(b)), \quad z = \exp_o(W h)

    The Grouplet paper compares it (Table 3, "Hyperboloid") with `MobiusLinear`, the same layer on the ball: with the
    same parameters both compute the same points. W h is clipped by the manifold, h is not. Without the bias the layer
    is a linear layer followed by an exponential map.

    Example:
        >>> from dmlkit.manifolds import Lorentz
        >>> LorentzLinear(64, Lorentz(16))(torch.randn(2, 64)).shape
        torch.Size([2, 17])
    """

    def requirements(self) -> Iterable[Requirement]:
        yield Requirement("manifold.name", ("lorentz",), "its bias is transported along geodesics of the hyperboloid")


class MobiusLinear(_HyperbolicLinear, name="mobius_linear"):
    r"""Hyperbolic layer (Ganea et al. 2018) of the Grouplet paper: Möbius matrix-vector product and bias.

    Linear layer of Ganea et al. (NeurIPS 2018, section 3.2) after an exponential map (Zhang et al., CVPR 2022).

    .. math:: y = (W \otimes \exp_0(h)) \oplus \exp_0(b), \quad W \otimes \exp_0(h) = \exp_0(W h)

    Zhang et al. describe the exponential map in their section 3.3. By the identity on the right (lemma 6 of Ganea et
    al.) the product is computed in the tangent space. W h is clipped by the manifold, h is not. b and the sum are kept
    inside the ball. With the same parameters `LorentzLinear` computes points with the same log maps. By the same
    identity the layer without the bias is a linear layer followed by an exponential map: see docs/geometry.md.

    Example:
        >>> from dmlkit.manifolds import Poincare
        >>> points = MobiusLinear(64, Poincare(16))(torch.randn(2, 64))
        >>> points.shape, bool((points.norm(dim=1) < 1).all())
        (torch.Size([2, 16]), True)
    """

    def requirements(self) -> Iterable[Requirement]:
        yield Requirement("manifold.name", ("poincare",), "Möbius operations are those of the ball")


import_on_demand(__name__)
