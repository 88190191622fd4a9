"""Every regularizer: a finite scalar with a finite gradient on every manifold, its other promises on one."""

from pathlib import Path
from tempfile import mkdtemp

import pytest

from dmlkit.manifolds.base import ManifoldConfig
from dmlkit.regularizers import RegularizerConfig
from dmlkit.testing.losses import REGULARIZER, degenerate_batches_stay_finite, value_is_a_finite_scalar
from dmlkit.testing.promise import Promise, fitting_manifolds, hold, title


def older_run() -> str:
    """The two files that make a folder a run, with what a regularizer reads of it."""
    folder = Path(mkdtemp())
    (folder / "environment.json").touch()
    (folder / "recipe.yaml").write_text("embedding_dim: 8\nmanifold: {name: sphere}\n")
    return str(folder)


SMALL = {"hierarchy": {"num_proxies": 8, "neighbors": 4, "triplets_per_anchor": 3}}  # 512 proxies take a minute
SMALL |= {"distill": {"teacher": older_run()}, "compatible": {"run": older_run()}}

ON_ALL = (value_is_a_finite_scalar, degenerate_batches_stay_finite)
CASES = [
    pytest.param(promise, config, manifold, id=f"{promise.__name__}-{name}-{title(manifold)}")
    for promise in REGULARIZER
    for name, variant in sorted(RegularizerConfig.variants.items())
    for config in [variant(**SMALL.get(name, {}))]
    for manifold in fitting_manifolds(config)[: None if promise in ON_ALL else 1]
]


@pytest.mark.parametrize(("promise", "config", "manifold"), CASES)
def test_contract(promise: Promise, config: RegularizerConfig, manifold: ManifoldConfig):
    hold([promise], config.name, config, manifold)
