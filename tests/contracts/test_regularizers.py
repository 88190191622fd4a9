"""Every regularizer on every manifold: a finite scalar with a finite gradient."""

import pytest

from dmlkit.manifolds.base import ManifoldConfig
from dmlkit.regularizers import RegularizerConfig
from dmlkit.testing.losses import REGULARIZER
from dmlkit.testing.promise import Promise, fitting_manifolds, hold, title

SMALL = {"hierarchy": {"num_proxies": 8, "neighbors": 4, "triplets_per_anchor": 3}}  # 512 proxies take a minute

PAIRS = [
    pytest.param(config, manifold, id=f"{name}-{title(manifold)}")
    for name, variant in sorted(RegularizerConfig.variants.items())
    for config in [variant(**SMALL.get(name, {}))]
    for manifold in fitting_manifolds(config)
]


@pytest.mark.parametrize(("config", "manifold"), PAIRS)
@pytest.mark.parametrize("promise", REGULARIZER, ids=lambda promise: promise.__name__)
def test_contract(promise: Promise, config: RegularizerConfig, manifold: ManifoldConfig):
    hold([promise], config.name, config, manifold)
