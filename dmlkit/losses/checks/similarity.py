"""Which manifolds a loss takes."""

from math import trunc

from dmlkit.component import Requirement
from dmlkit.manifolds.base import UNRELATED_RADIUS, Manifold
from dmlkit.manifolds.numerics.hyperbolic import strongest_curvature

BOUNDED = ("cosine", "origin_cosine", "negative_distance", "negative_squared_distance")
BOUNDED_REASON = "its margin or threshold is in units of a similarity that is at most 1, and 0 between unrelated points"
NEEDS_BOUNDED = Requirement("manifold.similarity", BOUNDED, BOUNDED_REASON)


def require_similarity(name: str, manifold: Manifold, allowed: tuple[str, ...], reason: str) -> None:
    """Refuse a manifold whose similarity makes no sense in a loss; the twin of a `Requirement` for library use.

    Raises:
        ValueError: says which similarity came, and which were expected.

    Example:
        >>> from dmlkit.manifolds import Sphere
        >>> sphere = Sphere(8, similarity="negative_distance")
        >>> require_similarity("ArcFace", sphere, ("cosine",), "it turns angles")
        Traceback (most recent call last):
        ...
        ValueError: ArcFace: expected a manifold with similarity 'cosine', got 'negative_distance': it turns angles
    """
    if manifold.similarity_name not in allowed:
        expected = " or ".join(map(repr, allowed))
        raise ValueError(
            f"{name}: expected a manifold with similarity {expected}, got {manifold.similarity_name!r}: {reason}"
        )


def require_bounded(name: str, manifold: Manifold) -> None:
    """Refuse a manifold whose `Manifold.relative_similarity` has no upper end: the twin of `NEEDS_BOUNDED`.

    Raises:
        ValueError: as `require_similarity` does.

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
