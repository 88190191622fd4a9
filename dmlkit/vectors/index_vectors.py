"""Vectors for an inner-product index by a manifest, in NumPy, for programs without torch.

This file imports NumPy alone and nothing of dmlkit, so it may also be copied.
"""

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

SHORTEST = 1e-6  # smallest norm that is divided by, as in the manifolds

Vectors = np.ndarray[Any, np.dtype[np.float64]]


def index_vectors(points: Any, index: Mapping[str, Any], side: Literal["query", "gallery"]) -> Vectors:
    """Return vectors whose inner product <query, gallery> orders a gallery as the model's similarity does.

    Args:
        index: ``manifest["index"]`` with the ``form`` of the vectors, and the ``curvature`` if the form has one.
        side: ``"query"`` or ``"gallery"``; the two may be lifted differently.

    Returns:
        (N, D') float64 with the same D' on both sides.

    Raises:
        ValueError: the points are not a matrix, or the side or the form is unknown; only its manifold knows ``own``.

    Example:
        >>> flat = {"form": "euclidean_lift", "curvature": None}
        >>> query, gallery = np.array([[1.0, 0.0]]), np.array([[0.0, 0.0], [1.0, 0.5]])
        >>> products = index_vectors(query, flat, "query") @ index_vectors(gallery, flat, "gallery").T
        >>> int(products.argmax())
        1
    """
    x: Vectors = np.asarray(points, dtype=np.float64)
    if x.ndim != 2:
        raise ValueError(f"index_vectors: expected points of shape (N, D), got {x.shape}")
    if side not in ("query", "gallery"):
        raise ValueError(f"index_vectors: side is {side!r}; expected 'query' or 'gallery'")
    match index["form"]:
        case "as_is":
            return x
        case "unit":
            return _unit(x)
        case "unit_space":
            return _unit(x[:, 1:])
        case "euclidean_lift":
            if side == "query":
                return np.hstack([2 * x, np.full((len(x), 1), -1.0)])
            return np.hstack([x, _squares(x)])
        case "poincare_lift":
            c, squares = -float(index["curvature"]), _squares(x)
            time = -(1 + c * squares) / c**0.5 if side == "query" else 2 * c**0.5 * squares
            return np.hstack([time, 2 * x]) / (1 - c * squares)
        case "lorentz_lift":
            c, space = -float(index["curvature"]), x[:, 1:]
            squares, radius = _squares(space), c**-0.5
            height = squares / (np.sqrt(1 / c + squares) + radius)  # above the origin; avoids cancellation
            return np.hstack([-height - radius if side == "query" else height, space])
        case form:
            own = "only its manifold computes these vectors, a product or that of a plug-in; use Manifold.index_vectors"
            advice = own if form == "own" else "another version of dmlkit wrote this manifest"
            raise ValueError(f"index_vectors: unknown form {form!r}; {advice}")


def _squares(x: Vectors) -> Vectors:
    return (x * x).sum(axis=1, keepdims=True)


def _unit(x: Vectors) -> Vectors:
    return x / np.maximum(np.sqrt(_squares(x)), SHORTEST)
