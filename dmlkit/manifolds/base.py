"""The manifold interface, and the distance arithmetic that its adapters share."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.linalg import vecdot

from dmlkit.component import ComponentConfig

Side = Literal["query", "gallery"]


class ManifoldConfig(ComponentConfig, frozen=True):
    """Root of the manifold family."""

    proxies: Literal["features", "points"] = "features"
    """How losses hold their proxies: ``features`` are free vectors mapped onto the manifold at every step,
    for any optimizer; ``points`` live on the manifold and need a Riemannian optimizer."""

    def build(self, dim: int) -> "Manifold":
        """The manifold for embeddings with ``dim`` features."""
        raise NotImplementedError


class Manifold(nn.Module, ABC):
    """A geometry for embeddings: points, their similarity and distance, and an exact inner-product search.

    Args:
        dim: d, the number of features that ``from_features`` takes.
        similarity: the name of the similarity that losses, evaluation and search use.
        proxies: see `ManifoldConfig.proxies`.

    Attributes:
        point_dim: D, the number of coordinates of a point (d, or d + 1 on the hyperboloid).
        geometry: the geoopt manifold, for Riemannian optimizers.

    Raises:
        ValueError: ``dim`` is not positive, or the similarity is not one that this manifold has.
    """

    similarities: ClassVar[tuple[str, ...]]
    takes_stacks: ClassVar[bool] = False
    """Whether ``distance(x, x)`` may be of stacks of points (..., N, D)."""
    geometry: Any

    def __init__(self, dim: int, *, similarity: str, proxies: Literal["features", "points"]) -> None:
        super().__init__()
        if dim < 1:
            raise ValueError(f"{type(self).__name__}: dim must be at least 1, got {dim}")
        if similarity not in self.similarities:
            raise ValueError(
                f"{type(self).__name__}: similarity {similarity!r} is unknown; expected one of {self.similarities}"
            )
        self.dim = dim
        self.point_dim = dim
        self.similarity_name = similarity
        self.proxies = proxies

    @abstractmethod
    def from_features(self, features: Tensor) -> Tensor:
        """Map features (..., d) of any size to points (..., D) on the manifold."""

    def to_features(self, points: Tensor) -> Tensor:
        """The features (..., d) of points (..., D): their log map at the origin where the space has one."""
        return points

    @abstractmethod
    def distance(self, x: Tensor, y: Tensor) -> Tensor:
        """The distance of points x (N, D) and y (M, D): (N, M), by matrix products.

        What floating point cannot tell from zero is zero, with a zero gradient: d(x, x) = 0.
        """

    @abstractmethod
    def paired_distance(self, x: Tensor, y: Tensor) -> Tensor:
        """The distance of points x (..., D) and y (..., D), broadcast: (...), as exact as the dtype allows.

        It takes differences before products, so it orders a short list of neighbours where `distance` rounds.
        """

    @abstractmethod
    def product_vectors(self, points: Tensor) -> Tensor:
        """Vectors (..., D') whose inner product is the similarity, where that is no distance: dot or a cosine."""

    @abstractmethod
    def distance_vectors(self, points: Tensor, side: Side) -> Tensor:
        """Vectors (N, D') whose inner product <query, gallery> falls with the distance of query and gallery."""

    def squared_distance(self, x: Tensor, y: Tensor) -> Tensor:
        """The square of `distance`: (N, M)."""
        return self.distance(x, y).square()

    def similarity(self, x: Tensor, y: Tensor) -> Tensor:
        """The chosen similarity of points x (N, D) and y (M, D): (N, M), larger is more alike."""
        match self.similarity_name:
            case "negative_distance":
                return -self.distance(x, y)
            case "negative_squared_distance":
                return -self.squared_distance(x, y)
            case _:
                return inner_products(self.product_vectors(x), None if x is y else self.product_vectors(y))

    def paired_similarity(self, x: Tensor, y: Tensor) -> Tensor:
        """The chosen similarity of points x (..., D) and y (..., D), broadcast: (...); see `paired_distance`."""
        match self.similarity_name:
            case "negative_distance":
                return -self.paired_distance(x, y)
            case "negative_squared_distance":
                return -self.paired_distance(x, y).square()
            case _:
                return vecdot(self.product_vectors(x), self.product_vectors(y))

    def index_vectors(self, points: Tensor, side: Side) -> Tensor:
        """Vectors whose inner product <query, gallery> orders a gallery as the similarity does.

        Args:
            points: (N, D).
            side: ``"query"`` or ``"gallery"``; the two may be lifted differently.

        Returns:
            (N, D'), the same D' on both sides, for any inner-product index.
        """
        if self.similarity_name in ("negative_distance", "negative_squared_distance"):
            return self.distance_vectors(points, side)
        return self.product_vectors(points)

    @abstractmethod
    def index_form(self) -> dict[str, Any]:
        """How `index_vectors` are made, by name and with parameters; in NumPy by `dmlkit.embedding.index_vectors`."""

    def learned_options(self) -> dict[str, float]:
        """Options of the config that training has changed, with their present values."""
        return {}

    def new_proxies(self, *shape: int) -> nn.Parameter:
        """A learnable tensor (*shape, d or D) of proxies, drawn from the global generator.

        Features have expected norm 1: the step of an adaptive optimizer then turns a proxy by the same angle
        at any width.
        """
        features = torch.randn(*shape, self.dim).div_(self.dim**0.5)  # in place: 2 GB for 1 000 000 proxies
        if self.proxies == "features":
            return nn.Parameter(features)
        import geoopt

        parameter: Any = geoopt.ManifoldParameter  # its stub lacks the arguments of __new__
        return parameter(self.from_features(features), manifold=self.geometry)

    def proxy_points(self, proxies: Tensor) -> Tensor:
        """The points (..., D) of proxies made by `new_proxies`."""
        return self.from_features(proxies) if self.proxies == "features" else proxies


def squared_distances(x: Tensor, y: Tensor) -> Tensor:
    """|x_i - y_j|^2 of x (N, D) and y (M, D) from one matrix product: (N, M), never (N, M, D).

    Example:
        >>> x = torch.randn(5, 512) * 30
        >>> squared_distances(x, x).diagonal().tolist()
        [0.0, 0.0, 0.0, 0.0, 0.0]
    """
    if x is y:
        squares = vecdot(x, x)
        scale = squares[..., :, None] + squares[..., None, :]
        return drop_rounding(scale - 2 * inner_products(x), scale)
    scale = x.square().sum(-1, keepdim=True) + y.square().sum(-1)  # (N, M)
    return drop_rounding(torch.addmm(scale, x, y.T, alpha=-2), scale)


def inner_products(x: Tensor, y: Tensor | None = None) -> Tensor:
    """<x_i, y_j> of x (N, D) and y (M, D): (N, M); y = x if it is not given, which saves a product in backward."""
    if y is not None:
        return x @ y.T
    gram: Any = _Gram.apply  # untyped in torch
    return gram(x)


class _Gram(torch.autograd.Function):
    """x x^T, whose gradient (G + G^T) x takes one matrix product where autograd takes two."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(x)
        return x @ x.mT

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return (grad + grad.mT) @ ctx.saved_tensors[0]


def drop_rounding(difference: Tensor, scale: Tensor) -> Tensor:
    """A difference of sums whose terms add up to ``scale``: 0 where it is below its rounding error.

    |x|^2 + |y|^2 - 2 x.y cancels when x and y are close: such entries become 0 with a zero gradient, so that
    d(x, x) = 0 (``torch.cdist`` leaves 8e-4 in float32).
    """
    return difference.masked_fill(difference < rounding_error(difference) * scale.detach(), 0)


def rounding_error(x: Tensor) -> float:
    """The relative error of a sum of products: 8 ulp, measured up to 5 ulp for 4 096 terms."""
    return 8 * torch.finfo(x.dtype).eps


def safe_sqrt(x: Tensor) -> Tensor:
    """sqrt(x) for x >= 0 with gradient 0, not infinity, at 0.

    Example:
        >>> x = torch.zeros(1, requires_grad=True)
        >>> safe_sqrt(x).backward(); x.grad.item()
        0.0
    """
    positive = x > 0
    return torch.where(positive, x, 1).sqrt() * positive
