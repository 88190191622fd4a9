"""How broken promises are reported."""

import ast
from pathlib import Path

import pytest
import torch

from dmlkit import testing
from dmlkit.losses import ArcFace, Margin
from dmlkit.manifolds import Euclidean, Sphere
from dmlkit.recipe.schema import FAMILIES
from dmlkit.testing.promise import expect, expect_close, expect_refused, fits, fitting_manifolds, hold


def it_is_small(number: float) -> None:
    """Check that the number is below 5.

    Only the first line is printed.
    """
    expect(number < 5, f"got {number}")


@pytest.mark.parametrize(
    ("number", "message"), [(7, "got 7"), ("7", "TypeError: '<' not supported between instances of 'str' and 'int'")]
)
def test_a_broken_promise_names_subject_promise_and_finding(number: float, message: str):
    hold([it_is_small], "four", 4)
    with pytest.raises(AssertionError) as caught:
        hold([it_is_small], "seven", number)
    assert str(caught.value) == f"seven: it_is_small: check that the number is below 5: {message}"


def test_random_numbers_of_the_caller_stay():
    def it_draws(draws: list[float]) -> None:
        draws.append(torch.rand(()).item())

    draws: list[float] = []
    state = torch.get_rng_state()
    hold([it_draws, it_draws], "chance", draws)
    assert torch.equal(torch.get_rng_state(), state) and draws[0] == draws[1]


def test_what_is_expected():
    with pytest.raises(AssertionError, match=r"value: Tensor-likes are not close! .* Greatest absolute difference"):
        expect_close(torch.zeros(2), torch.ones(2), "value")
    with pytest.raises(AssertionError, match="zero: expected ValueError, but nothing was raised"):
        expect_refused(lambda: None, ValueError, "", "zero")
    with pytest.raises(AssertionError, match="zero: expected a message like small, got large"):
        expect_refused(_raise, ValueError, "small", "zero")


def _raise() -> None:
    raise ValueError("large")


def test_requirements_choose_manifolds():
    assert fits(ArcFace.Config(), Sphere.Config()) and not fits(ArcFace.Config(), Euclidean.Config())
    assert {one.name for one in fitting_manifolds(Margin.Config())} == {"sphere"}  # its miner's, which is nested in it


def test_every_family_has_a_check():
    of_family = {"losses": "loss", "pooling": "pooling", "transport": "transport"}
    names = {f"check_{of_family.get(family, family.removesuffix('s'))}" for family in FAMILIES}
    assert set(testing.__all__) == names
    assert "raises an AssertionError that names what is broken" in (testing.__doc__ or "")
    for name in names:
        root = next(iter(getattr(testing, name).__annotations__.values()))
        assert root in FAMILIES.values()
        assert ">>>" in getattr(testing, name).__doc__


def test_checks_look_also_where_asserts_are_left_out():
    """By `expect`, as python -O removes assert statements."""
    paths = list(Path(testing.__file__).parent.glob("*.py"))
    assert paths
    for path in paths:
        assert not [node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Assert)], path
