"""Names of runs in tables: short, and never the same for two runs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmlkit.evaluation.compare import cut_names, short_names


@pytest.mark.parametrize(
    ("names", "cut"),
    [
        (["runs/a", "runs/b"], ["a", "b"]),
        (["runs/grocery_tuned_mpa", "runs/grocery_tuned_proxy_isa"], ["mpa", "proxy_isa"]),
        (["x/grocery_tuned_mpa", "y/grocery_tuned_mpa"], ["x/gro...ed_mpa", "y/gro...ed_mpa"]),
        (["grocery_tuned_mpa_of_2025_03", "grocery_tuned_mpa_of_2025_04"], ["03", "04"]),
        (["a_name_that_is_long_and_ends_in_1", "b"], ["a_nam...s_in_1", "b"]),
        (["a_name_that_is_long", "a_name_that_is_long_2"], ["long", "long_2"]),
    ],
)
def test_names_are_cut_to_what_tells_them_apart(names: list[str], cut: list[str]):
    assert short_names(names, 14) == cut


@given(st.lists(st.text("ab_/-", min_size=1, max_size=30), min_size=2, max_size=5, unique=True), st.integers(8, 20))
def test_cut_names_are_apart_and_as_short_as_asked_if_they_are_cut(names: list[str], width: int):
    cut = cut_names(names, width)
    assert len(set(cut)) == len(names) and all(cut)
    assert cut == names or max(map(len, cut)) <= width
