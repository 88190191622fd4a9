"""Manifolds: the geometry of embeddings. Each file holds one thin adapter of a geoopt manifold."""

from typing import TYPE_CHECKING

from dmlkit.component import load_family, missing_attribute
from dmlkit.manifolds.base import Manifold, ManifoldConfig
from dmlkit.manifolds.euclidean import Euclidean
from dmlkit.manifolds.lorentz import Lorentz
from dmlkit.manifolds.poincare import Poincare
from dmlkit.manifolds.sphere import Sphere

__all__ = [
    "Euclidean",
    "Lorentz",
    "Manifold",
    "ManifoldConfig",
    "Poincare",
    "Sphere",
]

load_family(__name__)

if not TYPE_CHECKING:  # otherwise every name would pass the type checker

    def __getattr__(name: str) -> object:
        raise missing_attribute(__name__, name)
