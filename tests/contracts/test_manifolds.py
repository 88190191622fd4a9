"""What every manifold promises, for every registered member and each of its similarities."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dmlkit.manifolds.base import ManifoldConfig
from dmlkit.testing.manifolds import (
    DIM,
    MANIFOLD,
    bad_arguments_are_refused,
    distance_is_a_metric,
    distance_to_itself_is_zero,
    expect_metric,
    features_come_back_from_points,
    half_precision_features_become_exact_points,
    proxies_are_points_either_way,
    the_class_defaults_are_the_configs,
)
from dmlkit.testing.promise import all_manifolds, hold, title

OF_ANY_SIMILARITY = (
    the_class_defaults_are_the_configs,
    distance_to_itself_is_zero,
    distance_is_a_metric,
    features_come_back_from_points,
    proxies_are_points_either_way,
    half_precision_features_become_exact_points,
    bad_arguments_are_refused,
)
FIRST = {config.name: config for config in reversed(list(all_manifolds()))}


@pytest.mark.parametrize("config", list(all_manifolds()), ids=title)
def test_contract(config: ManifoldConfig):
    left_out = () if config == FIRST[config.name] else OF_ANY_SIMILARITY
    hold([promise for promise in MANIFOLD if promise not in left_out], title(config), config)


@pytest.mark.parametrize("name", sorted(ManifoldConfig.variants))
@settings(max_examples=40, deadline=None)
@given(data=st.lists(st.floats(-3, 3, width=32), min_size=3 * DIM, max_size=3 * DIM))
def test_distance_is_a_metric(name: str, data: list[float]):
    triangle = torch.tensor(data, dtype=torch.float64).view(3, DIM) + 1e-3
    expect_metric(ManifoldConfig.variants[name](), triangle)
