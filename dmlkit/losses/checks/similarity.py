"""Which manifolds a loss takes."""

from dmlkit.manifolds.base import Manifold


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
