"""Product spaces: the coordinates of an embedding are shared among several spaces, whose distances add up."""

from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import AfterValidator, Field, PositiveFloat, PositiveInt
from torch import Tensor, nn

from dmlkit.component import one_of, option
from dmlkit.errors import OptionError
from dmlkit.manifolds.base import Manifold, ManifoldConfig, Side, load_geoopt
from dmlkit.manifolds.hyperbolic import Hyperbolic
from dmlkit.manifolds.poincare import Poincare
from dmlkit.manifolds.products import safe_sqrt
from dmlkit.manifolds.sphere import Sphere


def _plain_factors(factors: tuple[ManifoldConfig, ...]) -> tuple[ManifoldConfig, ...]:
    for index, factor in enumerate(factors):
        if isinstance(factor, Product.Config):
            raise ValueError(f"factor {index} is a product; list its factors instead")
        for key in ("similarity", "proxies"):
            default = type(factor).model_fields[key].default
            if getattr(factor, key) != default:
                raise ValueError(f"factor {index} ({factor.name}) has a {key} of its own; set manifold.{key} instead")
    return factors


Factors = Annotated[
    tuple[Annotated[ManifoldConfig, one_of], ...], Field(min_length=2, max_length=16), AfterValidator(_plain_factors)
]


class Product(Manifold, name="product"):
    r"""Several spaces side by side, e.g. a ball for the tree and a sphere for the leaves; distances add as squares.

    Points of M_1 x ... x M_n are the concatenated points of the factors, features are split among them, and each factor
    has a scale rho_i: a sphere of scale rho has radius rho, so the curvature 1 / rho^2 (Gu et al., ICLR 2019).

    .. math:: d(x, y)^2 = \sum_i \rho_i^2 \, d_i(x_i, y_i)^2, \quad
            h(x, y)^2 = \sum_i \rho_i^2 \, h_i(x_i, y_i)^2

    d is the distance, a metric. It has no form as inner products if a factor is hyperbolic, so losses, metrics and
    search use the chordal distance h, where h_i is the straight line between the points in the vector space around the
    factor: |x - y| in flat space and on the sphere, and in hyperbolic space the Lorentzian distance
    :math:`h_i = \frac{2}{\sqrt{-K}} \sinh(\sqrt{-K} d_i / 2)` of Law et al., ICML 2019, which breaks the triangle
    inequality. In every factor h grows with d; vectors for an index are those of the factors, concatenated.

    Similarities: ``negative_chordal_distance`` -h, ``negative_squared_chordal_distance`` -h^2.

    Raises:
        UserError: ``dim`` is not the sum of ``widths`` or no multiple of the number of factors, or the numbers of
            factors, widths and scales differ.

    Example:
        >>> from dmlkit.manifolds import Euclidean
        >>> space = Product(3, factors=(Euclidean.Config(), Sphere.Config()), widths=(1, 2))
        >>> points = space.from_features(torch.tensor([[0.0, 1.0, 0.0], [7.0, 0.0, 9.0]]))
        >>> points[1].tolist(), round(space.distance(points, points)[0, 1].item() ** 2, 4)  # 7^2 + 2
        ([7.0, 0.0, 1.0], 51.0)
    """

    has_prefixes: ClassVar[bool] = False
    factors: Factors = (Poincare.Config(), Sphere.Config())
    """Spaces, each with the keys of its manifold except ``similarity`` and ``proxies``; a hyperbolic one may have a
    ``learnable_curvature``."""
    widths: tuple[PositiveInt, ...] | None = None
    """Number of dimensions of each factor; null divides ``embedding_dim`` equally."""
    scales: tuple[PositiveFloat, ...] | None = None
    """rho_i, by which the distances of each factor are multiplied; null is 1 for each."""
    learnable_scales: bool = False
    """Train the scales together with the head."""
    similarity_name: Literal["negative_chordal_distance", "negative_squared_chordal_distance"] = option(
        default="negative_chordal_distance", alias="similarity"
    )
    """Similarity that orders neighbors and that losses use."""

    def __post_init__(self) -> None:
        super().__post_init__()
        count = len(self.factors)
        if self.widths is None and self.dim % count:
            raise OptionError("manifold.widths", f"{count} factors cannot share {self.dim} dimensions equally; set it")
        widths = self.widths or (self.dim // count,) * count
        for key, values in (("widths", widths), ("scales", self.scales or (1.0,) * count)):
            if len(values) != count:
                raise OptionError(f"manifold.{key}", f"got {len(values)} numbers for {count} factors; give one each")
        if sum(widths) != self.dim:
            raise OptionError("manifold.widths", f"{list(widths)} add up to {sum(widths)}, expected {self.dim}")
        every = [
            factor.model_copy(update={"proxies": self.proxies}).build(width)
            for factor, width in zip(self.factors, widths, strict=True)
        ]
        self.parts = nn.ModuleList(every)
        self.every: tuple[Manifold, ...] = tuple(every)
        self.feature_widths, self.point_widths = list(widths), [part.point_dim for part in every]
        self.point_dim = sum(self.point_widths)
        self.log_scales = nn.Parameter(
            torch.tensor(self.scales or (1.0,) * count).log(), requires_grad=self.learnable_scales
        )

    @cached_property  # not a submodule: its parameters are those of the factors
    def geometry(self) -> Any:
        return load_geoopt().ProductManifold(*((part.geometry, part.point_dim) for part in self.every))

    @property
    def is_hyperbolic(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return any(factor.is_hyperbolic for factor in self.factors)

    def from_features(self, features: Tensor) -> Tensor:
        parts = zip(self.every, features.split(self.feature_widths, -1), strict=True)
        return _joined([part.from_features(coordinates) for part, coordinates in parts])

    def to_features(self, points: Tensor) -> Tensor:
        return torch.cat([part.to_features(coordinates) for part, coordinates in self._parts(points)], -1)

    def distance_off(self, points: Tensor) -> Tensor:
        return torch.stack([part.distance_off(coordinates) for part, coordinates in self._parts(points)]).amax(0)

    def describe_off(self, point: Tensor) -> str:
        off = [float(part.distance_off(coordinates[None])) for part, coordinates in self._parts(point)]
        index = off.index(max(off))
        part, coordinates = self._parts(point)[index]
        return f"factor {index} ({type(part).__name__.lower()}): {part.describe_off(coordinates)}"

    def distance(self, x: Tensor, y: Tensor) -> Tensor:
        return safe_sqrt(self._sum([part.distance(*pair).square() for part, pair in self._pairs(x, y)]))

    def paired_distance(self, x: Tensor, y: Tensor) -> Tensor:
        return safe_sqrt(self._sum([part.paired_distance(*pair).square() for part, pair in self._pairs(x, y)]))

    def similarity(self, x: Tensor, y: Tensor) -> Tensor:
        chords = [chord(part, part.distance(*pair)) for part, pair in self._pairs(x, y)]
        return self._similarity(self._sum([length.square() for length in chords]))

    def paired_similarity(self, x: Tensor, y: Tensor) -> Tensor:
        chords = [chord(part, part.paired_distance(*pair)) for part, pair in self._pairs(x, y)]
        return self._similarity(self._sum([length.square() for length in chords]))

    def unrelated_distance(self) -> Tensor:
        """Return the chordal distance of points whose parts are all unrelated."""
        lengths = [chord(part, torch.as_tensor(part.unrelated_distance())) for part in self.every]
        return self._sum([length.to(self.log_scales).square() for length in lengths]).sqrt()

    def relative_similarity(self, x: Tensor, y: Tensor) -> Tensor:
        u = self.unrelated_distance()
        return 1 + self.similarity(x, y) / (u.square() if "squared" in self.similarity_name else u)

    def karcher_mean(self, points: Tensor) -> Tensor:
        """Return the means of the factors: no squared distance depends on two factors."""
        return torch.cat([part.karcher_mean(coordinates) for part, coordinates in self._parts(points)], -1)

    def product_vectors(self, points: Tensor) -> Tensor:
        raise TypeError("product: the similarity is a distance, not an inner product; use index_vectors")

    def distance_vectors(self, points: Tensor, side: Side) -> Tensor:
        """Return the vectors of the factors, concatenated: their inner product is -h^2 / 2 plus a number per query."""
        lifted: list[Tensor] = []
        for (part, coordinates), scale in zip(self._parts(points), self.log_scales.exp(), strict=True):
            # the vectors of Euclidean space give |x|^2 - h^2, the others c - h^2 / 2 with a number c
            half = scale if isinstance(part, Sphere | Hyperbolic) else scale * 0.5**0.5
            lifted.append(half * part.distance_vectors(coordinates, side))
        return torch.cat(lifted, -1)

    def index_vectors(self, points: Tensor, side: Side) -> Tensor:
        return self.distance_vectors(points, side)

    def learned_options(self) -> dict[str, Any]:
        factors = [
            config.model_copy(update=part.learned_options())
            for config, part in zip(self.factors, self.every, strict=True)
        ]
        learned: dict[str, Any] = {"factors": tuple(factors)}
        if self.learnable_scales:
            learned["scales"] = tuple(self.log_scales.exp().tolist())
        return learned

    def proxy_points(self, proxies: Tensor) -> Tensor:
        widths = self.feature_widths if self.proxies == "features" else self.point_widths
        parts = zip(self.every, proxies.split(widths, -1), strict=True)
        return _joined([part.proxy_points(coordinates) for part, coordinates in parts])

    def _parts(self, points: Tensor) -> list[tuple[Manifold, Tensor]]:
        """Return each factor with its coordinates of points (..., D)."""
        return list(zip(self.every, points.split(self.point_widths, -1), strict=True))

    def _pairs(self, x: Tensor, y: Tensor) -> list[tuple[Manifold, tuple[Tensor, Tensor]]]:
        """Return each factor with its coordinates of x and y; of equal points they are the same tensor."""
        parts_of_x = self._parts(x)
        parts_of_y = parts_of_x if x is y else self._parts(y)
        return [(part, (of_x, of_y)) for (part, of_x), (_, of_y) in zip(parts_of_x, parts_of_y, strict=True)]

    def _sum(self, squares: list[Tensor]) -> Tensor:
        """Compute the sum of rho_i^2 times the squares of each factor."""
        weights = (2 * self.log_scales).exp()
        total = weights[0] * squares[0]
        for weight, square in zip(weights[1:], squares[1:], strict=True):
            total = total + weight * square
        return total

    def _similarity(self, squared: Tensor) -> Tensor:
        return -squared if "squared" in self.similarity_name else -safe_sqrt(squared)


def chord(manifold: Manifold, distance: Tensor) -> Tensor:
    """Return the straight-line distance of points at a distance on a factor; see `Product`.

    Example:
        >>> chord(Sphere(2, metric="arc"), torch.tensor(torch.pi)).item()
        2.0
    """
    if isinstance(manifold, Hyperbolic):
        root = (-manifold.curvature.to(distance)).sqrt()
        return 2 / root * (root * distance / 2).sinh()
    if isinstance(manifold, Sphere) and manifold.metric == "arc":
        return 2 * (distance / 2).sin()
    return distance


def _joined(parts: list[Tensor]) -> Tensor:
    return torch.cat([part.float() if part.itemsize < 4 else part for part in parts], -1)
