"""Checks that a loss supports the manifold's similarity."""

from math import trunc

from dmlkit.component import Requirement
from dmlkit.manifolds.base import UNRELATED_RADIUS, Manifold
from dmlkit.manifolds.numerics.hyperbolic import strongest_curvature

BOUNDED = ("cosine", "origin_cosine", "negative_distance", "negative_squared_distance")
BOUNDED_REASON = "its margin or threshold is in units of a similarity that is at most 1, and 0 between unrelated points"
NEEDS_BOUNDED = Requirement("manifold.similarity", BOUNDED, BOUNDED_REASON)


def require_similarity(name: str, manifold: Manifold, allowed: tuple[str, ...], reason: str) -> None:
    """Reject a manifold whose similarity the loss does not support; the counterpart of `Requirement` for library use.

    Raises:
        ValueError: the similarity is not allowed; the message says what was expected and what was found.

    Example:
        >>> from dmlkit.manifolds import Sphere
        >>> sphere = Sphere(8, similarity="negative_distance")
        >>> require_similarity("Circle", sphere, ("cosine",), "it is bounded")
        Traceback (most recent call last):
        ...
        ValueError: Circle: expected a manifold with similarity 'cosine', because it is bounded; got 'negative_distance'
    """
    if manifold.similarity_name not in allowed:
        expected = " or ".join(map(repr, allowed))
        raise ValueError(
            f"{name}: expected a manifold with similarity {expected}, because {reason}; "
            f"got {manifold.similarity_name!r}"
        )


def require_bounded(name: str, manifold: Manifold) -> None:
    """Reject a manifold whose `Manifold.relative_similarity` is unbounded; the counterpart of `NEEDS_BOUNDED`.

    Raises:
        ValueError: see `require_similarity`.

    Example:
        >>> from dmlkit.manifolds import Sphere
        >>> require_bounded("ProxyAnchor", Sphere(8, similarity="negative_distance"))
    """
    require_similarity(name, manifold, BOUNDED, BOUNDED_REASON)
    curvature = getattr(manifold, "curvature", None)
    fault = None if curvature is None else too_curved(name, float(curvature), manifold.similarity_name)
    if fault:
        raise ValueError(f"{name}: curvature {fault}")


def too_curved(loss: str, curvature: float, similarity: str) -> str | None:
    """What is wrong with a curvature whose points cannot be as far apart as a loss takes unrelated ones to be, if it
    is: `Manifold.relative_similarity` would stay above 0 between any two at right angles.

    Example:
        >>> too_curved("proxy_anchor", -1.0, "negative_distance")
        >>> too_curved("proxy_anchor", -16.0, "negative_distance")[:60]
        'got -16, expected -9.6 or weaker: points of float32 end 1.55'
    """
    strongest = strongest_curvature(UNRELATED_RADIUS)
    if curvature >= strongest or similarity not in ("negative_distance", "negative_squared_distance"):
        return None
    border = UNRELATED_RADIUS * (strongest / curvature) ** 0.5
    return (
        f"got {curvature:g}, expected {trunc(10 * strongest) / 10} or weaker: points of float32 end {border:.3g} from "
        f"the origin, and {loss} takes two of different classes for unrelated at {UNRELATED_RADIUS:g}, so it could "
        "never push them so far apart; choose a weaker curvature, or similarity: origin_cosine"
    )
