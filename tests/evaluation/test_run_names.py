"""Names of runs in tables: short, and never the same for two runs."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmlkit.evaluation.compare import short_names


@pytest.mark.parametrize(
    "names",
    [
        ["runs/a", "runs/b"],
        ["x/grocery_tuned_mpa", "y/grocery_tuned_mpa"],
        ["grocery_tuned_mpa_of_2025_03", "grocery_tuned_mpa_of_2025_04"],
        ["a_name_that_is_long_and_ends_in_1", "b"],
    ],
)
def test_names_are_cut_to_what_tells_them_apart(names: list[str]):
    assert [len(name) <= 15 for name in short_names(names, 14)] == [True] * len(names)
    assert len(set(short_names(names, 14))) == len(names)


@given(st.lists(st.text("ab_/-", min_size=1, max_size=30), min_size=2, max_size=5, unique=True), st.integers(8, 20))
def test_cut_names_are_apart(names: list[str], width: int):
    apart = len({Path(name).resolve() for name in names}) == len(names)
    assert not apart or len(set(short_names(names, width))) == len(names)
