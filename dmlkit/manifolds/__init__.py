"""Manifolds: the geometry of embeddings. Each file holds one thin adapter of a geoopt manifold."""

from typing import TYPE_CHECKING

from dmlkit.component import import_on_demand

if TYPE_CHECKING:
    from dmlkit.manifolds.base import Manifold, ManifoldConfig
    from dmlkit.manifolds.euclidean import Euclidean
    from dmlkit.manifolds.lorentz import Lorentz
    from dmlkit.manifolds.poincare import Poincare
    from dmlkit.manifolds.product import Product
    from dmlkit.manifolds.sphere import Sphere

__all__ = ["Euclidean", "Lorentz", "Manifold", "ManifoldConfig", "Poincare", "Product", "Sphere"]

import_on_demand(__name__)
