"""The edge of a grid: whether the value that was chosen lies there, and what lies beyond."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import inf, isclose
from typing import Any

from dmlkit.errors import UserError
from dmlkit.recipe.file import Override, dump_recipe, parse_recipe
from dmlkit.recipe.yaml_tree import Tree
from dmlkit.study.definition.config import Candidate
from dmlkit.study.definition.methods import label

DIGITS = 6  # of a value beyond the edge: 0.001 / 3 is 0.000333333, in the name of a folder too


def beyond_edge(own: Sequence[Candidate], tried: Sequence[Candidate], best: Candidate) -> list[Mapping[str, Any]]:
    """Return tuned values one step on from the best ones, for each key and direction in which nothing was tried with
    the best values of the other keys: the next value of the key that was tried at all, or one beyond them.

    Steps beyond all values that were tried come first, and of these the one of the key that was extended least: a scale
    that is better at every step would otherwise use up `extend`, and leave a curvature at the edge of its grid.

    Args:
        own: a variant's candidates by the study's file, which are its grid.
        tried: those, and what was added to them.
        best: one of the tried ones.
    """
    found: list[tuple[float, Mapping[str, Any]]] = []
    for key, value in best.values.items():
        grid, known = (grid_of([one.values[key] for one in candidates]) for candidates in (own, tried))
        line = values_beside(tried, best, key)
        for sign, ascending in ((1, grid), (-1, grid[::-1])) if len(grid) > 1 else ():
            if all(sign * one <= sign * value for one in line):
                further = [one for one in known if sign * one > sign * value]
                step = min(further, key=lambda one: abs(one - value)) if further else value_beyond(best, key, ascending)
                if step is not None:
                    added = sum(sign * one > sign * ascending[-1] for one in known)
                    found.append((inf if further else added, {**best.values, key: step}))
    return [values for _, values in sorted(found, key=lambda one: one[0])]


def value_beyond(candidate: Candidate, key: str, grid: Sequence[float]) -> float | None:
    """`next_value` after a candidate's value of a tuned key. After the last whole number comes the fraction, where the
    recipe takes it: a grid that is written [1, 3] may be of a key that takes 0.3.

    Args:
        candidate: whose value lies at or beyond the end of the grid.
        key: which.
        grid: towards the end in question.
    """
    value = candidate.values[key]
    step = next_value(grid, value)
    if step is None:
        step = next_value([float(one) for one in grid], value)
        return step if takes(candidate, {**candidate.values, key: step}) else None
    return step


def values_beside(candidates: Sequence[Candidate], chosen: Candidate, key: str) -> list[Any]:
    """The values of a tuned key that were tried with the chosen values of all other keys."""
    return [one.values[key] for one in candidates if {**one.values, key: chosen.values[key]} == chosen.values]


def next_value(grid: Sequence[float], value: float) -> float | None:
    """One step on from a value at or beyond the end of a grid: by the last ratio, or by the difference where the grid
    is evenly spaced or its signs differ. None where no whole number follows in a grid of whole numbers.

    Args:
        grid: two values or more, towards the end in question.
        value: its last one, or one that was added there.

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
    if all(isinstance(one, int) for one in grid):
        whole = round(further)
        whole += (whole == value) * (1 if steps[-1] > 0 else -1)
        return None if is_ratio and whole == 0 else whole
    return float(f"{further:.{DIGITS}g}")


def with_values(candidate: Candidate, values: Mapping[str, Any], source: str) -> Candidate:
    """A candidate with other values of the tuned keys; ``source`` names them in errors.

    Raises:
        UserError: the recipe does not take them.
    """
    settings = [Override(key, Tree(source, value)) for key, value in values.items()]
    recipe = parse_recipe(dump_recipe(candidate.recipe), source, settings)
    return Candidate(label(settings), recipe, values)


def takes(candidate: Candidate, values: Mapping[str, Any]) -> bool:
    """Whether a candidate's recipe takes other values of the tuned keys."""
    try:
        with_values(candidate, values, "tune")
    except UserError:
        return False
    return True


def grid_of(values: Sequence[Any]) -> list[float]:
    """The distinct values of a tuned key in ascending order; none if one is no number.

    Example:
        >>> grid_of([4, 1, 2]), grid_of([1, "exact"])
        ([1, 2, 4], [])
    """
    if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        return []
    return sorted(set(values))
