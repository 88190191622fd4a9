"""Checks that a loss supports the manifold's similarity."""

from dmlkit.component import Requirement
from dmlkit.manifolds.base import Manifold

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
