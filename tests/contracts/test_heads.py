"""Every head on every manifold: points of the manifold, finite gradients, full precision under autocast."""

import pytest

from dmlkit.heads import HeadConfig
from dmlkit.manifolds.base import ManifoldConfig
from dmlkit.testing.networks import HEAD
from dmlkit.testing.promise import Promise, fits, hold

PAIRS = [
    pytest.param(head(), manifold(), id=f"{name}-{space}")
    for name, head in sorted(HeadConfig.variants.items())
    for space, manifold in sorted(ManifoldConfig.variants.items())
    if fits(head(), manifold())
]


@pytest.mark.parametrize(("config", "manifold"), PAIRS)
@pytest.mark.parametrize("promise", HEAD, ids=lambda promise: promise.__name__)
def test_contract(promise: Promise, config: HeadConfig, manifold: ManifoldConfig):
    hold([promise], config.name, config, manifold)
