"""Manifolds: the geometry of embeddings. Each file holds one thin adapter of a geoopt manifold."""

from dmlkit.component import load_family
from dmlkit.manifolds.base import Manifold, ManifoldConfig
from dmlkit.manifolds.euclidean import Euclidean
from dmlkit.manifolds.lorentz import Lorentz
from dmlkit.manifolds.poincare import Poincare
from dmlkit.manifolds.product import Product
from dmlkit.manifolds.sphere import Sphere

__all__ = ["Euclidean", "Lorentz", "Manifold", "ManifoldConfig", "Poincare", "Product", "Sphere"]

load_family(__name__)
