"""Every regularizer on every manifold: a finite scalar with a finite gradient."""

from pathlib import Path
from tempfile import mkdtemp

import pytest

from dmlkit.manifolds.base import ManifoldConfig
from dmlkit.regularizers import RegularizerConfig
from dmlkit.testing.loss_values import a_step_never_waits_for_the_device
from dmlkit.testing.losses import REGULARIZER, the_state_dict_is_complete
from dmlkit.testing.promise import Promise, a_line_of_help_says_what_it_is, fitting_manifolds, hold, title


def older_run() -> str:
    """The two files that make a folder a run, with what a regularizer reads of it."""
    folder = Path(mkdtemp())
    (folder / "environment.json").touch()
    (folder / "recipe.yaml").write_text("embedding_dim: 8\nmanifold: {name: sphere}\n")
    return str(folder)


SMALL = {"hierarchy": {"num_proxies": 8, "neighbors": 4, "triplets_per_anchor": 3}}  # 512 proxies take a minute
SMALL |= {"distill": {"teacher": older_run()}, "compatible": {"run": older_run()}}

ON_ONE = (the_state_dict_is_complete, a_line_of_help_says_what_it_is, a_step_never_waits_for_the_device)
CASES = [
    pytest.param(promise, config, manifold, id=f"{promise.__name__}-{name}-{title(manifold)}")
    for promise in REGULARIZER
    for name, variant in sorted(RegularizerConfig.variants.items())
    for config in [variant(**SMALL.get(name, {}))]
    for manifold in fitting_manifolds(config)[: 1 if promise in ON_ONE else None]
]


@pytest.mark.parametrize(("promise", "config", "manifold"), CASES)
def test_contract(promise: Promise, config: RegularizerConfig, manifold: ManifoldConfig):
    hold([promise], config.name, config, manifold)
