"""A loss on several spaces at once: on nested prefixes of the embeddings, or on the factors of a product space."""

from collections.abc import Iterable
from itertools import pairwise
from typing import Annotated, Any

import torch
from pydantic import AfterValidator, Field, NonNegativeFloat, PositiveInt
from torch import Tensor, nn

from dmlkit.component import Requirement, one_of, option
from dmlkit.losses.base import Loss, LossConfig
from dmlkit.losses.contrastive import Contrastive
from dmlkit.losses.proxy_anchor import ProxyAnchor
from dmlkit.manifolds.base import Manifold
from dmlkit.manifolds.product import Product

SMALLEST = 8  # coordinates of the shortest prefix by default, as in the paper


class SeveralLosses(Loss):
    """A weighted sum of losses, each with proxies and memories of its own."""

    num_classes: Any = option(default=None, kw_only=False)
    """C, for losses that own something per class."""

    def hold(self, losses: Iterable[Loss]) -> None:
        """Take the built losses; call it before `Loss.__post_init__`."""
        self.each: Any = nn.ModuleList(losses)
        self.num_classes = next((loss.num_classes for loss in self.each if loss.num_classes is not None), None)

    def set_epoch(self, epoch: int) -> None:
        for loss in self.each:
            loss.set_epoch(epoch)

    def weighted_sum(self, weights: Iterable[float], parts: Iterable[Tensor], labels: Tensor) -> Tensor:
        """Add the losses of their points, times their weights."""
        return weighted(weights, [loss.compute(points, labels) for loss, points in zip(self.each, parts, strict=True)])


def misplaced(key: str, losses: Iterable[LossConfig]) -> Iterable[tuple[str, str]]:
    """Yield the faults of a loss that holds others: only the outermost one gets the points before the neck."""
    for loss in losses:
        if "before" in (getattr(loss, "on", None) or ()):
            yield key, f"{loss.name} has on: before, but only the outermost loss gets the points before the neck"


def weighted(weights: Iterable[float], values: Iterable[Tensor]) -> Tensor:
    """Add at least one value times its weight; one value of weight 1 stays the same to the bit."""
    first, *others = (weight * value for weight, value in zip(weights, values, strict=True))
    return sum(others, start=first)


def build_with(config: Any, manifold: Manifold, num_classes: int | None) -> Loss:
    """Build a loss; ``num_classes`` may be missing for one that owns nothing per class."""
    return config.build(manifold, **({} if num_classes is None else {"num_classes": num_classes}))


def fall(dims: tuple[int, ...]) -> tuple[int, ...]:
    """Return numbers of coordinates that fall."""
    if any(after >= before for before, after in pairwise(dims)):
        raise ValueError(f"expected numbers that fall, each smaller than the one before; got {list(dims)}")
    return dims


class Matryoshka(SeveralLosses, name="matryoshka"):
    r"""Matryoshka (Kusupati et al. 2022): a loss on nested prefixes, so that embeddings can be cut short.

    Kusupati et al., NeurIPS 2022 (arXiv:2205.13147), eq. 1; x_{1:m} = the first m features of the point x.

    .. math:: \sum_{m \in M} c_m \, \mathrm{loss}_m\big(\mathrm{point}(x_{1:m})\big)

    A prefix is a point of the same space with m dimensions: on the sphere it is normalized again, in Euclidean space it
    is the coordinates themselves, and in hyperbolic space the first m coordinates of the log map at the origin are
    mapped back, so it keeps the direction and shrinks in distance. A learned curvature is shared by all prefixes.

    Each prefix has a loss of its own, with proxies and memories of m dimensions: the paper's MRL. Prefixes of common
    proxies, the paper's MRL-E, save memory but score lower in the paper at few dimensions, and would need to know what
    each loss stores. The proxies take sum(M) / D times the memory of the plain loss.

    With one prefix, of full width and weight 1, the loss equals the plain loss to the bit.

    Raises:
        ValueError: the first of ``dims`` is not the width of the embeddings, or ``weights`` has another length.

    Example:
        >>> from dmlkit.manifolds import Euclidean
        >>> points = torch.tensor([[0.0, 0.0], [1.0, 2.0]])
        >>> loss = Matryoshka(Euclidean(2), dims=(2, 1))
        >>> loss(points, torch.tensor([0, 0])).item()  # (1^2 + 2^2) + 1^2
        6.0
    """

    loss: Annotated[LossConfig, one_of] = Contrastive.Config()
    """The loss to compute on each prefix."""
    dims: Annotated[tuple[PositiveInt, ...], Field(min_length=1), AfterValidator(fall)] | None = None
    """M, the lengths of the prefixes, from the full width down; null halves the width as long as 8 remain."""
    weights: tuple[NonNegativeFloat, ...] | None = None
    """c, the weight of each of ``dims``; null is 1 for all."""

    def requirements(self) -> Iterable[Requirement]:
        yield Requirement(
            "manifold.has_prefixes", (True,), "the first coordinates of a product are those of one factor"
        )
        if self.dims is not None:
            reason = "the first of loss.dims is the full width, since coordinates after it would not be trained"
            yield Requirement("embedding_dim", self.dims[:1], reason)

    def faults(self) -> Iterable[tuple[str, str]]:
        yield from misplaced("loss", [self.loss])
        if self.weights is not None and len(self.weights) != len(self.dims or ()):
            dims = f"dims {self.dims}" if self.dims else "dims; set dims too"
            yield "weights", f"got {self.weights}, expected one for each of {dims}"

    def __post_init__(self) -> None:
        width = self.manifold.dim
        if not self.manifold.has_prefixes:
            raise ValueError(
                f"Matryoshka: expected a manifold of one factor, got {type(self.manifold).__name__}, whose first "
                "coordinates are those of its first factor"
            )
        dims = self.dims or tuple(_halved(width))
        if dims[0] != width:
            raise ValueError(f"Matryoshka: dims: expected the first to be the embeddings' width {width}, got {dims[0]}")
        self.dims, self.weights = dims, self.weights or (1.0,) * len(dims)
        self.hold(build_with(self.loss, self.manifold.with_dim(dim), self.num_classes) for dim in dims)
        super().__post_init__()

    def compute(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        assert self.weights is not None
        prefixes = (self.manifold.prefix(embeddings, loss.manifold) for loss in self.each)
        return self.weighted_sum(self.weights, prefixes, labels)


def _halved(width: int) -> Iterable[int]:
    yield width
    while width // 2 >= SMALLEST:
        width //= 2
        yield width


class PerFactor(SeveralLosses, name="per_factor"):
    r"""A loss on each factor of a product space, so that each has to separate the classes on its own.

    .. math:: \sum_i c_i \, \mathrm{loss}_i(x_i)

    x_i is the part of the point x on factor i, whose loss has proxies and memories of its own and compares by the
    default similarity of that space, e.g. the cosine on a sphere. Other losses on a product compare whole points, by
    the chords of the factors together; evaluation and search do so with either.

    Raises:
        ValueError: the manifold is not a product, or ``weights`` has another length.

    Example:
        >>> from dmlkit.losses import Contrastive
        >>> from dmlkit.manifolds import Euclidean
        >>> line = Product(2, factors=(Euclidean.Config(), Euclidean.Config()))
        >>> loss = PerFactor(line, loss=Contrastive.Config(), weights=(1.0, 10.0))
        >>> loss(torch.tensor([[0.0, 0.0], [3.0, 2.0]]), torch.tensor([0, 0])).item()  # 3^2 + 10 * 2^2
        49.0
    """

    loss: Annotated[LossConfig, one_of] = ProxyAnchor.Config()
    """The loss to compute on each factor."""
    weights: tuple[NonNegativeFloat, ...] | None = None
    """c, the weight of each factor; null is 1 for all."""

    def faults(self) -> Iterable[tuple[str, str]]:
        return misplaced("loss", [self.loss])

    def requirements(self) -> Iterable[Requirement]:
        yield Requirement("manifold.name", ("product",), "it computes a loss on each factor")
        yield Requirement("manifold.learnable_scales", (False,), "the scales take no part in the losses of the factors")

    def __post_init__(self) -> None:
        if not isinstance(self.manifold, Product):
            raise ValueError(f"PerFactor: expected a product of spaces, got {type(self.manifold).__name__}")
        factors, self.point_widths = self.manifold.every, self.manifold.point_widths
        self.weights = self.weights or (1.0,) * len(factors)
        if len(self.weights) != len(factors):
            raise ValueError(f"PerFactor: weights: expected one for each of {len(factors)} factors, got {self.weights}")
        self.hold(build_with(self.loss, factor, self.num_classes) for factor in factors)
        super().__post_init__()

    @property
    def has_proxies(self) -> bool:
        return self.loss.has_proxies

    @property
    def proxies(self) -> Tensor:
        """Proxies of the product: those of the factors' losses, concatenated; (C, d) or (C, K, d)."""
        return torch.cat([loss.proxies for loss in self.each], -1)

    def compute(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        assert self.weights is not None
        return self.weighted_sum(self.weights, embeddings.split(self.point_widths, -1), labels)
