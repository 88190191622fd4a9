"""Methods of a study: the keys that each one sets or tunes, and the extension of a grid beyond its edges."""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise, product
from math import inf, isclose, prod
from typing import Any

from dmlkit.errors import UserError
from dmlkit.files.yaml_tree import Key, Tree
from dmlkit.recipe.file import dump_recipe, parse_recipe
from dmlkit.recipe.overrides import Override
from dmlkit.study.definition.config import Candidate, MethodsConfig


@dataclass(frozen=True)
class Method:
    """Variant before its recipe is read: its place in the file, the keys that it sets and the keys that it tunes."""

    name: str
    place: Key
    recipe: Tree  # name of the recipe, with its line
    settings: tuple[Override, ...]
    tune: tuple[tuple[Override, ...], ...]  # the values of each tuned key

    @property
    def trials(self) -> int:
        """Number of combinations of tuned values."""
        return prod(len(values) for values in self.tune)


def num_recipes(config: MethodsConfig) -> int:
    """Return the number of recipes that `methods_of` would create."""
    trials = prod(map(len, config.tune.values()))
    if config.variants is None:
        return trials * prod(map(len, (config.grid or {}).values()))
    tunes = (variant.tune for variant in config.variants.values())
    return sum(trials if tune is None else prod(map(len, tune.values())) for tune in tunes)


def methods_of(config: MethodsConfig, tree: Tree) -> list[Method]:
    """Return the methods of a study's file."""
    everywhere = tuple(Override(key, tree.below(("overrides", key))) for key in config.overrides)
    tune = _values(tree, ("tune",), config.tune)
    if config.variants is None:
        grid = _values(tree, ("grid",), config.grid or {})
        return [
            Method(label(settings), ("grid",), tree.below(("recipe",)), (*everywhere, *settings), tune)
            for settings in product(*grid)
            if settings
        ]
    methods: list[Method] = []
    for name, variant in config.variants.items():
        place: Key = ("variants", name)
        settings = tuple(Override(key, tree.below((*place, key))) for key in variant.model_extra or {})
        own_tune = tune if variant.tune is None else _values(tree, (*place, "tune"), variant.tune)
        recipe = tree.below((*place, "recipe") if variant.recipe is not None else ("recipe",))
        methods.append(Method(name, place, recipe, (*everywhere, *settings), own_tune))
    return methods


def _values(tree: Tree, place: Key, keys: dict[str, tuple[Any, ...]]) -> tuple[tuple[Override, ...], ...]:
    return tuple(
        tuple(Override(key, tree.below((*place, key, index))) for index in range(len(values)))
        for key, values in keys.items()
    )


def label(settings: Sequence[Override]) -> str:
    """Return the label of a combination of values, which is valid as the name of a folder.

    Example:
        >>> from dmlkit.files.yaml_tree import parse_yaml
        >>> tree = parse_yaml("{a: 0.1, b: {name: exact}}", "s.yaml")
        >>> label([Override("loss.margin", tree.below(("a",))), Override("loss.solver", tree.below(("b",)))])
        'margin=0.1,solver=exact'
    """
    ends = [setting.key.rpartition(".")[2] for setting in settings]
    keys = ends if len(set(ends)) == len(ends) else [setting.key for setting in settings]
    return ",".join(f"{key}={_text(setting.value.data)}" for key, setting in zip(keys, settings, strict=True))


def _text(value: Any) -> str:
    short = value["name"] if isinstance(value, dict) and list(value) == ["name"] else value
    plain = short if isinstance(short, str) else json.dumps(short, ensure_ascii=False)
    return re.sub(r"[^\w.+-]+", "_", plain).strip("_")


DIGITS = 6  # of a value beyond the edge: 0.001 / 3 becomes 0.000333333, also in the name of its folder


def beyond_edge(planned: Sequence[Candidate], tried: Sequence[Candidate], best: Candidate) -> list[Mapping[str, Any]]:
    """Return combinations one step beyond the best one, for each key and direction at which the best is at the edge.

    The best is at an edge if no value beyond it was tried with its values of the other keys. A step leads to the next
    value of the key that was tried in any combination, or to a new value beyond all of them. Steps to new values come
    first, and among these the step of the key that was extended least: a scale that is better at every step would
    otherwise use up ``extend`` and leave a curvature at the edge of its grid.

    Args:
        planned: candidates of the study's file, which form the grid of a variant.
        tried: these candidates and those that were added.
    """
    steps: list[tuple[float, Mapping[str, Any]]] = []
    for key, value in best.values.items():
        grid, known = (grid_of([candidate.values[key] for candidate in candidates]) for candidates in (planned, tried))
        line = values_along(tried, best, key)
        for sign, ordered in ((1, grid), (-1, grid[::-1])) if len(grid) > 1 else ():
            if all(sign * other <= sign * value for other in line):
                beyond = [other for other in known if sign * other > sign * value]
                step = min(beyond, key=lambda other: abs(other - value)) if beyond else value_beyond(best, key, ordered)
                if step is not None:
                    added = sum(sign * other > sign * ordered[-1] for other in known)
                    steps.append((inf if beyond else added, {**best.values, key: step}))
    return [values for _, values in sorted(steps, key=lambda pair: pair[0])]


def value_beyond(candidate: Candidate, key: str, grid: Sequence[float]) -> float | None:
    """Return the `next_value` after a candidate's value, at or beyond the end of a grid that is ordered towards it.

    If no integer follows, a fraction is returned where the recipe accepts it: the key of a grid [1, 3] may accept 0.3.
    """
    value = candidate.values[key]
    step = next_value(grid, value)
    if step is None:
        fraction = next_value([float(number) for number in grid], value)
        with suppress(UserError):
            with_values(candidate, {**candidate.values, key: fraction}, "tune")
            return fraction
    return step


def values_along(candidates: Sequence[Candidate], chosen: Candidate, key: str) -> list[Any]:
    """Return the values of a tuned key that were tried with the chosen values of all other keys."""
    return [
        candidate.values[key]
        for candidate in candidates
        if {**candidate.values, key: chosen.values[key]} == chosen.values
    ]


def next_value(grid: Sequence[float], value: float) -> float | None:
    """Return the value one step beyond a value at or beyond the end of a grid, whose values are ordered towards it.

    The step repeats the last ratio, or the last difference if the grid is evenly spaced or its signs differ. The result
    is None if no integer follows in a grid of integers.

    Example:
        >>> next_value([1e-3, 2e-3, 4e-3], 4e-3), next_value([4e-3, 2e-3, 1e-3], 1e-3), next_value([1e-3, 3e-3], 3e-3)
        (0.008, 0.0005, 0.009)
        >>> next_value([0.1, 0.2, 0.3], 0.3), next_value([8, 16, 32], 64), next_value([4, 2, 1], 1)
        (0.4, 128, None)
    """
    steps = [after - before for before, after in pairwise(grid)]
    is_even = len(steps) > 1 and all(isclose(step, steps[0], rel_tol=1e-6) for step in steps)
    is_ratio = grid[-1] * grid[-2] > 0 and not is_even
    further = value * (grid[-1] / grid[-2]) if is_ratio else value + steps[-1]
    if all(isinstance(number, int) for number in grid):
        whole = round(further)
        whole += (whole == value) * (1 if steps[-1] > 0 else -1)
        return None if is_ratio and whole == 0 else whole
    return float(f"{further:.{DIGITS}g}")


def with_values(candidate: Candidate, values: Mapping[str, Any], source: str) -> Candidate:
    """Return a candidate with other values of the tuned keys; ``source`` names them in errors."""
    settings = [Override(key, Tree(source, value)) for key, value in values.items()]
    recipe = parse_recipe(dump_recipe(candidate.recipe), source, settings)
    return Candidate(label(settings), recipe, values)


def grid_of(values: Sequence[Any]) -> list[float]:
    """Return the distinct values of a tuned key in ascending order; empty if one of them is not a number.

    Example:
        >>> grid_of([4, 1, 2]), grid_of([1, "exact"])
        ([1, 2, 4], [])
    """
    if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        return []
    return sorted(set(values))
