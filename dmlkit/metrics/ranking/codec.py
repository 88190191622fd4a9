"""Vectors of fewer coordinates or bits: what an index keeps of embeddings, and what a search then finds."""

import re
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from dmlkit.manifolds.base import Manifold
from dmlkit.manifolds.euclidean import Euclidean
from dmlkit.manifolds.sphere import Sphere
from dmlkit.metrics.ranking.rankings import as_directions
from dmlkit.nearest.rescore import Rescorer

Precision = Literal["fp32", "fp16", "int8", "binary", "rescored"]
BITS: dict[Precision, int] = {"fp32": 32, "fp16": 16, "int8": 8, "binary": 1, "rescored": 1}
RESCORED = 100  # candidates of each query


class Stored(NamedTuple):
    """Form in which vectors are stored."""

    dims: int | None
    """Number of first coordinates that are kept; None for all."""
    precision: Precision


def stored_form(text: str) -> Stored:
    """Return the form that a number of coordinates, a precision or both name.

    Example:
        >>> stored_form("64"), stored_form("64:int8")
        (Stored(dims=64, precision='fp32'), Stored(dims=64, precision='int8'))
    """
    known: dict[str, Precision] = {name: name for name in BITS}
    match = re.fullmatch(rf"(?:([1-9][0-9]{{0,8}})(?::(?=.)|$))?({'|'.join(known)})?", text)
    if not text or match is None:
        expected = f"a number of coordinates, {', '.join(known)}, or both, e.g. 64:int8"
        raise ValueError(f"--form {text!r}: expected {expected}")
    return Stored(int(match[1]) if match[1] else None, known[match[2] or "fp32"])


@dataclass(frozen=True)
class Codec:
    """Encoding of the points of a manifold, and the points that remain of them.

    A prefix of a point on the sphere is normalized again, as in the loss ``matryoshka``. ``int8`` has 256 equal steps
    between the smallest and the largest value of each coordinate. ``binary`` keeps the sign of each coordinate as 1 or
    -1; the inner product of two decoded points is d - 2 h for a Hamming distance h, without rounding, so that equal
    distances tie. ``rescored`` is ``binary``, and orders the 100 best candidates of a query again by the similarity of
    the full points.
    """

    manifold: Manifold
    stored: Stored
    ranges: Tensor  # (N, D) points whose coordinates give the ranges of ``int8``

    def __post_init__(self) -> None:
        space, (dims, precision) = self.manifold, self.stored
        name = type(space).__name__.lower()
        if dims is not None and dims > space.dim:
            raise ValueError(f"--form {dims}: the embeddings have {space.dim} coordinates; give at most {space.dim}")
        if not isinstance(space, Sphere | Euclidean):
            raise ValueError(f"--form applies to sphere and euclidean: cut or rounded points of {name} leave the space")
        if BITS[precision] == 1 and not isinstance(space, Sphere):
            raise ValueError(f"--form {precision}: signs keep directions alone, and the space is {name}; use int8")

    @property
    def dims(self) -> int:
        """Number of coordinates that are kept."""
        return self.stored.dims or self.manifold.dim

    @property
    def bytes(self) -> int:
        """Bytes per vector."""
        return -(-self.dims * BITS[self.stored.precision] // 8)

    @property
    def space(self) -> Manifold:
        """Geometry of the decoded points."""
        is_binary = BITS[self.stored.precision] == 1
        return Euclidean(self.dims, similarity="dot") if is_binary else self.manifold.with_dim(self.dims)

    def decode(self, points: Tensor) -> Tensor:
        """Return what the stored form keeps of points (N, D), as points (N, dims) float32."""
        vectors = self._prefix(points)
        match self.stored.precision:
            case "fp16":
                vectors = vectors.half().float()
            case "int8":
                ranges = self._prefix(self.ranges.to(points.device))
                low, high = ranges.amin(0), ranges.amax(0)
                step = ((high - low) / 255).clamp(min=1e-12)
                vectors = low + ((vectors - low) / step).round().clamp(0, 255) * step
            case "binary" | "rescored":
                return torch.where(vectors < 0, -1.0, 1.0)
            case _:
                pass
        return self._as_points(vectors)

    def _prefix(self, points: Tensor) -> Tensor:
        if self.dims == points.shape[1]:
            return points.float()
        return self._as_points(points[:, : self.dims].float().contiguous())

    def _as_points(self, vectors: Tensor) -> Tensor:
        return as_directions(vectors, "embeddings") if isinstance(self.manifold, Sphere) else vectors


def by_full_points(manifold: Manifold, queries: Tensor, gallery: Tensor) -> Rescorer:
    """Return the rescorer that orders the candidates of a search by full points (Q, D) and (N, D) alone."""

    def scores(rows: Tensor, items: Tensor) -> Tensor:
        return manifold.similarity(queries[rows], gallery).double().gather(1, items)

    return Rescorer(scores, 1.0, RESCORED)
