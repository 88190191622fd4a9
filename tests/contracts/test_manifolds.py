"""What every manifold promises, for every registered member and each of its similarities."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dmlkit.manifolds.base import ManifoldConfig
from dmlkit.testing.manifolds import DIM, MANIFOLD, expect_metric
from dmlkit.testing.promise import Promise, all_manifolds, hold, title

CONFIGS = list(all_manifolds())


@pytest.mark.parametrize("config", CONFIGS, ids=title)
@pytest.mark.parametrize("promise", MANIFOLD, ids=lambda promise: promise.__name__)
def test_contract(promise: Promise, config: ManifoldConfig):
    hold([promise], title(config), config)


@pytest.mark.parametrize("name", sorted(ManifoldConfig.variants))
@settings(max_examples=40, deadline=None)
@given(data=st.lists(st.floats(-3, 3, width=32), min_size=3 * DIM, max_size=3 * DIM))
def test_distance_is_a_metric(name: str, data: list[float]):
    triangle = torch.tensor(data, dtype=torch.float64).view(3, DIM) + 1e-3
    expect_metric(ManifoldConfig.variants[name](), triangle)
