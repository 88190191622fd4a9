"""Every regularizer on every manifold: a finite scalar with a finite gradient."""

import pytest

from dmlkit.manifolds.base import ManifoldConfig
from dmlkit.regularizers import RegularizerConfig
from dmlkit.testing.promise import Promise, fitting_manifolds, hold, title
from dmlkit.testing.regularizers import REGULARIZER

PAIRS = [
    pytest.param(variant(), manifold, id=f"{name}-{title(manifold)}")
    for name, variant in sorted(RegularizerConfig.variants.items())
    for manifold in fitting_manifolds(variant())
]


@pytest.mark.parametrize(("config", "manifold"), PAIRS)
@pytest.mark.parametrize("promise", REGULARIZER, ids=lambda promise: promise.__name__)
def test_contract(promise: Promise, config: RegularizerConfig, manifold: ManifoldConfig):
    hold([promise], config.name, config, manifold)
