"""Matryoshka loss: the sum of a loss over the first coordinates of the embeddings, for several numbers of them."""

from collections.abc import Iterable
from copy import copy
from itertools import pairwise
from typing import Annotated, Any

from pydantic import AfterValidator, Field, NonNegativeFloat, PositiveInt
from torch import Tensor, nn

from dmlkit.component import Requirement, one_of, option
from dmlkit.losses.base import Loss, LossConfig
from dmlkit.losses.contrastive import Contrastive
from dmlkit.manifolds.base import Manifold

SMALLEST = 8  # coordinates of the shortest prefix by default, as in the paper


def fall(dims: tuple[int, ...]) -> tuple[int, ...]:
    """Return numbers of coordinates that fall.

    Raises:
        ValueError: they do not.
    """
    if any(after >= before for before, after in pairwise(dims)):
        raise ValueError(f"expected numbers that fall, each smaller than the one before; got {list(dims)}")
    return dims


class Matryoshka(Loss, name="matryoshka"):
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
        >>> import torch
        >>> from dmlkit.manifolds import Euclidean
        >>> points = torch.tensor([[0.0, 0.0], [1.0, 2.0]])
        >>> loss = Matryoshka(Euclidean(2), dims=(2, 1))
        >>> loss(points, torch.tensor([0, 0])).item()  # (1^2 + 2^2) + 1^2
        6.0
    """

    num_classes: Any = option(default=None, kw_only=False)
    """C, for a loss that owns something per class."""
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
        if self.weights is not None and len(self.weights) != len(self.dims or ()):
            reason = f"loss.weights has one number for each of loss.dims, which has {len(self.dims or ())}"
            yield Requirement("loss.weights", (None,), reason)

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
        if self.weights is not None and len(self.weights) != len(self.dims or ()):
            raise ValueError(f"Matryoshka: weights: expected one for each of dims {self.dims}, got {self.weights}")
        self.dims, self.weights = dims, self.weights or (1.0,) * len(dims)
        classes = {} if self.num_classes is None else {"num_classes": self.num_classes}
        build: Any = self.loss.build
        losses: list[Loss] = [build(prefix_manifold(self.manifold, dim), **classes) for dim in dims]
        self.losses = nn.ModuleList(losses)
        self.num_classes = losses[0].num_classes
        super().__post_init__()

    def set_epoch(self, epoch: int) -> None:
        for loss in self._each():
            loss.set_epoch(epoch)

    def compute(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        assert self.weights is not None
        values = [
            weight * loss.compute(prefix(self.manifold, loss.manifold, embeddings), labels)
            for weight, loss in zip(self.weights, self._each(), strict=True)
        ]
        return sum(values[1:], start=values[0])

    def _each(self) -> Iterable[Loss]:
        return (loss for loss in self.losses if isinstance(loss, Loss))


def _halved(width: int) -> Iterable[int]:
    yield width
    while width // 2 >= SMALLEST:
        width //= 2
        yield width


def prefix_manifold(manifold: Manifold, dim: int) -> Manifold:
    """Return the same space with ``dim`` dimensions; it shares the manifold's learned curvature.

    Example:
        >>> from dmlkit.manifolds import Lorentz
        >>> prefix_manifold(Lorentz(4), 2).point_dim
        3
    """
    if dim == manifold.dim:
        return manifold
    cut = copy(manifold)
    cut.dim, cut.point_dim = dim, manifold.point_dim - manifold.dim + dim
    return cut


def prefix(manifold: Manifold, cut: Manifold, points: Tensor) -> Tensor:
    """Return the points (N, D') of the first features of points (N, D) of a manifold.

    Example:
        >>> import torch
        >>> from dmlkit.manifolds import Sphere
        >>> prefix(Sphere(3), Sphere(2), torch.tensor([[0.0, 0.6, 0.8]])).tolist()
        [[0.0, 1.0]]
    """
    if cut.dim == manifold.dim:
        return points
    return cut.from_features(manifold.to_features(points)[..., : cut.dim])
