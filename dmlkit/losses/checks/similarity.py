"""Which manifolds a loss takes."""

from dmlkit.component import Requirement
from dmlkit.manifolds.base import Manifold

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
