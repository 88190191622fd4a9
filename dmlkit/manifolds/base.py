"""The manifold interface, and what works on every manifold: checks of points, and their mean."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from copy import copy
from math import inf
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn
from torch.linalg import vecdot

from dmlkit.component import Component, ComponentConfig, Requirement, option
from dmlkit.errors import UserError
from dmlkit.manifolds.products import inner_products

Side = Literal["query", "gallery"]
# Distance from the origin. Glyphs, 5 epochs, Proxy-Anchor's defaults on the hyperboloid, mean of 3 seeds on validation:
# map@r 0.867 at radius 1, 0.877 at 1.5, 0.896 at 2, 0.669 at 3.
UNRELATED_RADIUS = 2.0
LARGEST = 1e16  # coordinate: the products of a million of them are below 3e38, where float32 ends
MEAN_STEPS = 200  # maximum number of iterations of a mean; 5 to 30 suffice
MEAN_PRECISION = 1e-10  # length of the mean tangent vector at which to stop; it is 0 at the mean
NEEDS_BOUNDED = Requirement(
    "manifold.similarity",
    (
        "cosine",
        "origin_cosine",
        "negative_distance",
        "negative_squared_distance",
        "negative_chordal_distance",
        "negative_squared_chordal_distance",
    ),
    "its margin or threshold is in units of a similarity that is at most 1, and 0 between unrelated points",
)


class ManifoldConfig(ComponentConfig, frozen=True):
    """Root of the manifold family."""

    has_prefixes: ClassVar[bool] = True
    """Whether the first coordinates of features are features of the same space with fewer dimensions."""
    is_hyperbolic: ClassVar[bool] = False
    """Whether the space is hyperbolic, or a product with a hyperbolic factor."""
    proxies: Literal["features", "points"] = "features"
    """How losses store their proxies: ``features`` are free vectors mapped onto the manifold at every step,
    for any optimizer; ``points`` are on the manifold and need a Riemannian optimizer."""

    @abstractmethod
    def build(self, dim: int) -> "Manifold":
        """Return the manifold for embeddings with ``dim`` features."""


class Manifold(Component, nn.Module, ABC, family=ManifoldConfig):
    """A geometry for embeddings: points, their similarity and distance, and exact search by inner products.

    Raises:
        ValueError: ``dim`` is not positive, or the manifold does not have this similarity.
    """

    takes_stacks: ClassVar[bool] = False
    """Whether ``distance(x, x)`` accepts stacks of points (..., N, D)."""
    has_prefixes: ClassVar[bool] = True
    is_hyperbolic: ClassVar[bool] = False
    longest: ClassVar[float] = inf
    """Largest norm of a row that counts as a point, see `find_invalid_point`."""
    dim: int = option(kw_only=False)
    """d, the number of features that ``from_features`` takes."""
    similarity_name: Any = option(init=False)
    """Name of the similarity that losses, evaluation and search use: the key ``similarity`` of the manifold."""
    proxies: Literal["features", "points"] = "features"
    point_dim: int = option(init=False)
    """D, the number of coordinates of a point (d, or d + 1 on the hyperboloid)."""
    geometry: Any = option(init=False)
    """The geoopt manifold, for Riemannian optimizers."""

    def __post_init__(self) -> None:
        if self.dim < 1:
            raise ValueError(f"{type(self).__name__}: dim must be at least 1, got {self.dim}")
        self.point_dim = self.dim

    def with_dim(self, dim: int) -> Self:
        """Return the same space for the first ``dim`` features, with all options and the same learned curvature.

        Raises:
            ValueError: the manifold is a product, whose first features are those of its first factor.

        Example:
            >>> from dmlkit.manifolds import Euclidean
            >>> Euclidean(8, similarity="dot").with_dim(2).similarity_name
            'dot'
        """
        if dim == self.dim:
            return self
        if not self.has_prefixes:
            raise ValueError(f"{type(self).__name__}: the first {dim} of its {self.dim} features are no point of it")
        shorter = copy(self)  # shares the parameters
        shorter.dim, shorter.point_dim = dim, self.point_dim - self.dim + dim
        return shorter

    def prefix(self, points: Tensor, shorter: "Manifold") -> Tensor:
        """Return the points (..., D') of the first features of points (..., D), in the space of `with_dim`."""
        if shorter.dim == self.dim:
            return points
        return shorter.from_features(self.to_features(points)[..., : shorter.dim])

    @abstractmethod
    def from_features(self, features: Tensor) -> Tensor:
        """Map features (..., d) of any size to points (..., D) on the manifold."""

    def to_features(self, points: Tensor) -> Tensor:
        """Map points (..., D) to features (..., d): their log map at the origin if the space has one."""
        return points

    @property
    def learns(self) -> bool:
        """Whether training changes the space, so that points of earlier steps need not be points of it."""
        return any(parameter.requires_grad for parameter in self.parameters())

    @property
    def memory_dim(self) -> int:
        """Number of coordinates that `to_memory` returns."""
        return self.dim if self.learns else self.point_dim

    def to_memory(self, points: Tensor) -> Tensor:
        """Return what a memory keeps of points (..., D) for later steps: their features if the space `learns`."""
        return self.to_features(points.detach()).detach() if self.learns else points.detach()

    def from_memory(self, kept: Tensor) -> Tensor:
        """Return the points (..., D) of what `to_memory` returned, as the space is now."""
        return self.from_features(kept.clone()) if self.learns else kept  # written to before the backward pass

    @abstractmethod
    def distance_off(self, points: Tensor) -> Tensor:
        """Return how far rows (N, D) are from the manifold, relative to their size: (N,); nan or inf for rows that are
        not finite.

        The value of a point is 0 up to rounding errors; a row with a value above 0.01 cannot be a point; see
        `find_invalid_point`.
        """

    def describe_off(self, point: Tensor) -> str:
        """Describe why finite numbers (D,) are not a point, and what was expected."""
        return f"it is {float(self.distance_off(point[None])):.2g} of its size off the {type(self).__name__} manifold"

    @abstractmethod
    def distance(self, x: Tensor, y: Tensor) -> Tensor:
        """Compute the distances of points x (N, D) and y (M, D): (N, M), by matrix products.

        Values that rounding errors do not distinguish from zero are zero, with a zero gradient: d(x, x) = 0.
        """

    @abstractmethod
    def paired_distance(self, x: Tensor, y: Tensor) -> Tensor:
        """Compute the distances of points x (..., D) and y (..., D), broadcast: (...), as exact as the dtype allows.

        It subtracts before it multiplies, so it orders a short list of neighbors for which `distance` rounds.
        """

    @abstractmethod
    def product_vectors(self, points: Tensor) -> Tensor:
        """Return vectors (..., D') whose inner product is the similarity, if it is dot or a cosine, not a distance."""

    @abstractmethod
    def distance_vectors(self, points: Tensor, side: Side) -> Tensor:
        """Return vectors (N, D') whose inner product <query, gallery> decreases with the distance of the two points."""

    def squared_distance(self, x: Tensor, y: Tensor) -> Tensor:
        """Compute the square of `distance`: (N, M)."""
        return self.distance(x, y).square()

    def similarity(self, x: Tensor, y: Tensor) -> Tensor:
        """Compute the chosen similarity of points x (N, D) and y (M, D): (N, M); larger means more similar."""
        match self.similarity_name:
            case "negative_distance":
                return -self.distance(x, y)
            case "negative_squared_distance":
                return -self.squared_distance(x, y)
            case _:
                return inner_products(self.product_vectors(x), None if x is y else self.product_vectors(y))

    def exact_similarity(self, x: Tensor, y: Tensor) -> Tensor:
        """Compute `similarity`, distances in float64: their products cancel far from the origin."""
        if not self.similarity_name.endswith("distance"):
            return self.similarity(x, y)
        return self.similarity(x.double(), y.double()).to(x.dtype)

    def paired_similarity(self, x: Tensor, y: Tensor) -> Tensor:
        """Compute the chosen similarity of points x (..., D) and y (..., D), broadcast: (...)."""
        match self.similarity_name:
            case "negative_distance":
                return -self.paired_distance(x, y)
            case "negative_squared_distance":
                return -self.paired_distance(x, y).square()
            case _:
                return vecdot(self.product_vectors(x), self.product_vectors(y))

    def unrelated_distance(self) -> Tensor | float:
        """Return u, the distance of two points at `UNRELATED_RADIUS` from the origin, in perpendicular directions.

        In many dimensions, two random directions are almost perpendicular. This is the value in flat space; on the unit
        sphere both points have distance 1 from the center.
        """
        return 2**0.5 * UNRELATED_RADIUS

    def karcher_mean(self, points: Tensor) -> Tensor:
        """Return the point (D,) with the minimum sum of squared distances to points (N, D) float64.

        Follow the mean tangent vector until it vanishes (Karcher flow); halve a step that increases the sum.
        """
        mean = self.from_features(self.to_features(points).mean(0))
        spread, step = self.paired_distance(mean, points).square().mean(), 1.0
        for _ in range(MEAN_STEPS):
            tangent = self.geometry.logmap(mean, points).mean(0)
            if tangent.norm() <= MEAN_PRECISION:
                break
            nearer = self.geometry.expmap(mean, step * tangent)
            nearer_spread = self.paired_distance(nearer, points).square().mean()
            if nearer_spread < spread:
                mean, spread = nearer, nearer_spread
            else:
                step /= 2
                if step < MEAN_PRECISION:
                    break
        return mean

    def relative_similarity(self, x: Tensor, y: Tensor) -> Tensor:
        """Compute `similarity` of points x (N, D) and y (M, D) in units of a cosine, for losses: (N, M).

        A cosine is 1 between a point and itself and 0 between unrelated points. Losses with margin or threshold assume
        this. A negative distance is 0 in the first case and -u in the second, and never positive. Therefore distances
        become 1 - d / u and 1 - (d / u)^2; cosines and inner products are unchanged. The order is that of `similarity`.
        """
        match self.similarity_name:
            case "negative_distance":
                return 1 + self.similarity(x, y) / self.unrelated_distance()
            case "negative_squared_distance":
                return 1 + self.similarity(x, y) / self.unrelated_distance() ** 2
            case _:
                return self.similarity(x, y)

    def index_vectors(self, points: Tensor, side: Side) -> Tensor:
        """Return vectors whose inner product <query, gallery> orders a gallery as the similarity does.

        Args:
            side: ``"query"`` or ``"gallery"``; the two may be lifted in different ways.

        Returns:
            (N, D'), with the same D' on both sides, for any inner-product index.
        """
        if self.similarity_name in ("negative_distance", "negative_squared_distance"):
            return self.distance_vectors(points, side)
        return self.product_vectors(points)

    def index_form(self) -> dict[str, Any]:
        """Return how `dmlkit.vectors.index_vectors` computes `index_vectors` in NumPy, by name and parameters.

        ``own``, the default, is for vectors that only the manifold itself computes.
        """
        return {"form": "own"}

    def learned_options(self) -> dict[str, Any]:
        """Return the options of the config that training changes, with their current values."""
        return {}

    def new_proxies(self, *shape: int) -> nn.Parameter:
        """Return a learnable tensor (*shape, d or D) of proxies, drawn from the global generator.

        Features have expected norm 1: the step of an adaptive optimizer then rotates a proxy by the same angle
        for any width.
        """
        features = torch.randn(*shape, self.dim).div_(self.dim**0.5)  # in place: 2 GB for 1 000 000 proxies
        if self.proxies == "features":
            return nn.Parameter(features)
        return load_geoopt().ManifoldParameter(self.from_features(features), manifold=self.geometry)

    def proxy_points(self, proxies: Tensor) -> Tensor:
        """Return the points (..., D) of proxies made by `new_proxies`."""
        return self.from_features(proxies) if self.proxies == "features" else proxies


def load_geoopt() -> Any:
    """Import geoopt when it is needed, since that takes 0.7 s, without torch's warning about functions that geoopt
    scripts."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch.jit")
        import geoopt

    return geoopt


# Our own points are off by 4e-7 at most (2 048 dimensions, float32), and all files hold float32. Points that were kept
# in half precision in between are off by the rounding of each coordinate: 2^-11 = 0.0005 in float16 and 2^-8 = 0.004 in
# bfloat16, x_0 of the hyperboloid by twice that. An error within the tolerance changes no cosine by more than 0.02.
TOLERANCE = 0.01
ROWS = 8192  # checked at once: 16 MB at 512 dimensions stay in the cache from one pass to the next


def too_long(point: Tensor) -> str:
    """Describe a row (D,) whose inner products overflow, by its largest coordinate."""
    return f"its largest coordinate is {float(point.abs().max()):.4g}, and inner products overflow above {LARGEST:g}"


@torch.no_grad()  # the curvature of a manifold may be learned
def find_invalid_point(manifold: Manifold, points: Tensor) -> tuple[int, str] | None:
    """Find the first row of (N, D) that is not a point of a manifold; return its number and a description of the error.

    The result is None if all rows are points. Checking 100 000 x 512 numbers takes 10 ms on the sphere or hyperboloid
    or in a ball, and 20 ms in flat space, in bounded memory.

    Example:
        >>> from dmlkit.manifolds import Sphere
        >>> find_invalid_point(Sphere(2), torch.tensor([[0.6, 0.8], [3.0, 4.0], [0.0, float("nan")]]))
        (1, 'its length is 5, where points of the sphere have length 1')
    """
    for number, block in enumerate(points.split(ROWS)):
        is_off = ~(manifold.distance_off(block) <= TOLERANCE)  # also where it is nan
        if is_off.any():
            rows = is_off.nonzero()[:, 0]
            exact = manifold.distance_off(block[rows].double())  # in float32 a square above 3e38 is infinite
            is_off[rows] = ~(exact <= TOLERANCE)
        is_wrong = is_off if manifold.longest < inf else is_off | (block.abs().amax(1) > LARGEST)
        if is_wrong.any():
            row = int(is_wrong.nonzero()[0])
            point, error = block[row], "its embedding has nan or inf"
            if point.isfinite().all():
                error = manifold.describe_off(point) if is_off[row] else too_long(point)
            return number * ROWS + row, error
    return None


def check_points(manifold: Manifold, points: Tensor, name: Callable[[int], str], advice: str) -> None:
    """Check that numbers (N, D) are points of a manifold.

    Args:
        name: returns the name of a row for the error: its file and its image.
        advice: what the user can do about a row that is not a point.
    """
    error = find_invalid_point(manifold, points)
    if error is not None:
        row, description = error
        raise UserError(f"{name(row)}: {description}; {advice}")


@torch.no_grad()
def frechet_mean(manifold: Manifold, points: Tensor) -> Tensor:
    r"""Compute the Fréchet mean: the point with minimum :math:`\sum_i d(m, x_i)^2`, in float64.

    If the similarity is an inner product or a cosine, not a distance, compute the point with the maximum sum of
    similarities, a mean direction.

    Returns:
        (D,) float64.

    Example:
        >>> from dmlkit.manifolds import Poincare
        >>> frechet_mean(Poincare(1), torch.tensor([[-0.5], [0.5]], dtype=torch.float64)).abs().item() < 1e-9
        True
    """
    points = points.double()
    if manifold.similarity_name.endswith("distance"):
        return manifold.karcher_mean(points)
    return manifold.from_features(manifold.product_vectors(points).mean(0))
