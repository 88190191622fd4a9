"""What every manifold promises, for every registered member and each of its similarities."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dmlkit.embedding.index_vectors import index_vectors
from dmlkit.embedding.manifest import index_of
from dmlkit.manifolds.base import ManifoldConfig, Side
from dmlkit.testing.manifolds import DIM, MANIFOLD, expect_metric, features
from dmlkit.testing.promise import Promise, all_manifolds, changed, hold, title

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


@pytest.mark.parametrize("config", CONFIGS, ids=title)
def test_index_vectors_in_numpy_are_those_of_the_manifold_s9(config: ManifoldConfig):
    bent = {"curvature": -0.7} if "curvature" in type(config).model_fields else {}
    manifold = changed(config, **bent).build(DIM).double()
    points = manifold.from_features(torch.cat([features(8), torch.zeros(1, DIM)]).double())
    told = json.loads(index_of(manifold).model_dump_json())
    sides: tuple[Side, ...] = ("query", "gallery")
    for side in sides:
        in_numpy = index_vectors(points.numpy(), told, side)
        np.testing.assert_allclose(in_numpy, manifold.index_vectors(points, side).numpy(), rtol=1e-9, atol=1e-300)
