"""What lies beyond the edge of a grid."""

from math import prod
from random import Random
from typing import Any

import pytest

from dmlkit.recipe.file import parse_recipe
from dmlkit.study.definition.config import Candidate
from dmlkit.study.definition.methods import beyond_edge, next_value, with_values
from dmlkit.study.verdicts import edges_of
from tests.conftest import TINY_RECIPE

RECIPE = parse_recipe(TINY_RECIPE, "tiny.yaml")


def candidates(**keys: list[Any]) -> list[Candidate]:
    """Every combination, the last key changing fastest."""
    found: list[dict[str, Any]] = [{}]
    for key, values in keys.items():
        found = [{**one, key: value} for one in found for value in values]
    assert len(found) == prod(map(len, keys.values()))
    return [Candidate(str(values), RECIPE, values) for values in found]


@pytest.mark.parametrize(
    ("grid", "value", "expected"),
    [
        ([1e-3, 2e-3, 4e-3], 8e-3, 0.016),  # which was added; the simplest cases are in its docstring
        ([1e-3, 3e-3, 1e-2], 1e-2, 0.0333333),
        ([0.3, 0.2, 0.1], 0.1, 0.0),
        ([-1.0, -0.5, 0.5], 0.5, 1.5),  # a ratio of two signs is none
        ([-0.1, -0.3, -0.9], -0.9, -2.7),
        ([-0.9, -0.3, -0.1], -0.1, -0.0333333),
        ([0.0, 0.1], 0.1, 0.2),
        ([30, 10], 10, 3),
        ([2, 4, 6], 6, 8),
    ],
)
def test_the_next_value_goes_on_as_the_grid_does(grid: list[float], value: float, expected: float):
    found = next_value(grid, value)
    assert found == expected and type(found) is type(expected)


def test_only_the_ends_of_a_grid_have_something_beyond_them():
    own = candidates(lr=[4e-3, 1e-3, 2e-3])  # in any order
    assert [beyond_edge(own, own, one) for one in own] == [[{"lr": 8e-3}], [{"lr": 5e-4}], []]
    more = candidates(lr=[8e-3])
    assert beyond_edge(own, [*own, *more], own[0]) == []  # it is the best although something lies beyond it
    assert beyond_edge(own, [*own, *more], more[0]) == [{"lr": 0.016}]


@pytest.mark.parametrize("values", [["a", "b"], [True, False], [{"name": "exact"}, {"name": "none"}], [1e-3]])
def test_what_is_no_grid_of_numbers_has_no_edge(values: list[Any]):
    own = candidates(key=values)
    assert [beyond_edge(own, own, one) for one in own] == [[]] * len(own)


def test_a_key_at_the_edge_of_its_grid_is_extended_before_another_one_twice():
    own = candidates(scale=[16, 32, 64], curvature=[-0.1, -0.3, -1.0])
    flattest = next(one for one in own if one.values == {"scale": 64, "curvature": -0.1})
    assert beyond_edge(own, own, flattest)[0] == {"scale": 128, "curvature": -0.1}
    further = candidates(scale=[128], curvature=[-0.1])
    assert beyond_edge(own, [*own, *further], further[0]) == [
        {"scale": 128, "curvature": -0.0333333},
        {"scale": 256, "curvature": -0.1},
        {"scale": 128, "curvature": -0.3},
    ]


def sides(tried: list[Candidate], chosen: Candidate, key: str, *, alone: bool) -> tuple[bool, bool]:
    """Whether a lower and a higher value of a key was tried, ``alone`` with the chosen values of the other keys."""
    lower = higher = False
    for one in tried:
        if alone and any(one.values[other] != chosen.values[other] for other in chosen.values if other != key):
            continue
        lower = lower or one.values[key] < chosen.values[key]
        higher = higher or one.values[key] > chosen.values[key]
    return lower, higher


# by whether a lower and a higher value was tried with the other chosen values
EDGES = {(True, True): None, (True, False): "highest", (False, True): "lowest"}
ALONE = {  # for the only value of its line, by whether a lower and a higher value was tried at all
    (True, True): "only",
    (True, False): "only, highest",
    (False, True): "only, lowest",
    (False, False): "only",
}


@pytest.mark.parametrize("seed", range(40))
def test_edges_and_what_lies_beyond_are_those_of_a_naive_look(seed: int):
    random = Random(seed)
    rates, curvatures = [1e-3, 2e-3, 4e-3][: random.randint(1, 3)], [-0.1, -0.3][seed % 2 :]
    own = candidates(lr=rates, scale=[16.0, 32.0, 64.0], curvature=curvatures)
    tried = [*random.sample(own, random.randint(2, len(own))), *candidates(lr=[8e-3], scale=[64.0], curvature=[-0.3])]
    for chosen in tried:
        expected: dict[str, str] = {}
        open_sides: set[tuple[str, bool]] = set()
        for key in chosen.values:
            line, every = (sides(tried, chosen, key, alone=alone) for alone in (True, False))
            end = EDGES[line] if line in EDGES else ALONE[every]
            if end:
                expected[key] = end
            open_sides |= {(key, is_higher) for is_higher in (False, True) if not line[is_higher]}
        assert edges_of(tried, chosen) == expected
        values_of = {key: {one.values[key] for one in own} for key in chosen.values}
        steps = beyond_edge(own, tried, chosen)
        moved = [next(key for key in step if step[key] != chosen.values[key]) for step in steps]
        found = [(key, step[key] > chosen.values[key]) for key, step in zip(moved, steps, strict=True)]
        assert len(found) == len(set(found))
        assert set(found) == {(key, is_higher) for key, is_higher in open_sides if len(values_of[key]) > 1}
        is_new = [not sides(tried, chosen, key, alone=False)[is_higher] for key, is_higher in found]
        assert is_new == sorted(is_new, reverse=True)  # those beyond all that was tried come first
        known = [any(one.values[key] == step[key] for one in tried) for key, step in zip(moved, steps, strict=True)]
        assert known == [not new for new in is_new]


def test_a_candidate_with_other_values_is_the_recipe_that_says_so():
    own = Candidate("lr=0.003", RECIPE, {"optimizer.lr": 0.003})
    assert with_values(own, own.values, "grid") == own
    found = with_values(own, {"optimizer.lr": 0.006}, "grid")
    assert found.label == "lr=0.006"
    assert found.recipe == parse_recipe(TINY_RECIPE, "tiny.yaml", ["optimizer.lr=0.006"])
