"""Promises: functions that raise AssertionError if a component does not do what their first docstring line says."""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, get_args

import torch
from torch import Tensor
from torch.testing import assert_close

from dmlkit.component import ComponentConfig, components_below
from dmlkit.manifolds.base import ManifoldConfig

Promise = Callable[..., None]
DIM = 8  # features of the manifolds on which components are checked


def hold(promises: Sequence[Promise], subject: str, *arguments: Any) -> None:
    """Check a component against promises, each called with the arguments, without changing the random state.

    The first argument, its configuration, needs a docstring, see `a_line_of_help_says_what_it_is`.

    Example:
        >>> def is_small(number):
        ...     "Check that the number is below 5."
        ...     expect(number < 5, f"got {number}")
        >>> hold([is_small], "seven", 7)
        Traceback (most recent call last):
        ...
        AssertionError: seven: is_small: check that the number is below 5: got 7
    """
    for promise in (a_line_of_help_says_what_it_is, *promises):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            try:
                promise(*arguments)
            except Exception as error:  # a component may fail in any way
                message = f"{error}" if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
                line = (promise.__doc__ or "").strip().partition("\n")[0].rstrip(".")
                words = f"{promise.__name__}: {line[:1].lower()}{line[1:]}"
                raise AssertionError(f"{subject}: {words}: {message}") from error


def expect(holds: bool | Tensor, message: str) -> None:
    """Raise an AssertionError if a condition is false; works under ``python -O``, which removes assert."""
    if not bool(holds):
        raise AssertionError(message)


def expect_close(
    actual: Any, expected: Any, what: str, *, atol: float | None = None, rtol: float | None = None
) -> None:
    """Compare tensors with `torch.testing.assert_close` and name them in the message if they differ."""
    assert_close(actual, expected, atol=atol, rtol=rtol, msg=lambda text: f"{what}: {' '.join(text.split())}")


def expect_refused(call: Callable[[], object], error: type[Exception], pattern: str, what: str) -> None:
    """Check that a call raises an error whose message matches a pattern."""
    try:
        call()
    except error as refusal:
        message = str(refusal)
        expect(re.search(pattern, message) is not None, f"{what}: expected a message like {pattern}, got {message}")
    else:
        raise AssertionError(f"{what}: expected {error.__name__}, but nothing was raised")


def a_line_of_help_says_what_it_is(config: object, *_: object) -> None:
    """Check that the configuration's docstring starts with a line of text, which ``dmlkit list`` prints."""
    expect(bool((type(config).__doc__ or "").split("\n")[0].strip()), f"{type(config).__name__} has no docstring")


def changed(config: Any, **options: Any) -> Any:
    """Return the configuration with changed options, validated."""
    return type(config)(**{**dict(config), **options})


def all_manifolds() -> Iterator[ManifoldConfig]:
    """Yield every known manifold with each of its similarities."""
    for variant in ManifoldConfig.variants.values():
        for similarity in get_args(variant.model_fields["similarity"].annotation):
            yield variant(similarity=similarity)


def fits(component: ComponentConfig, manifold: ManifoldConfig) -> bool:
    """Return whether the requirements of a component and of those nested in it, e.g. a miner, allow a manifold."""
    requirements = [need for _, part in components_below((), component) for need in part.requirements()]
    needs = [need for need in requirements if need.key.startswith("manifold.")]
    return all(getattr(manifold, need.key.removeprefix("manifold."), None) in need.allowed for need in needs)


def fitting_manifolds(component: ComponentConfig) -> list[ManifoldConfig]:
    """Return the manifolds that a component supports, the sphere first."""
    spaces = [space for space in all_manifolds() if fits(component, space)]
    expect(bool(spaces), f"{component.name}: its requirements allow none of the known manifolds")
    return sorted(spaces, key=lambda space: space.name != "sphere")


def title(config: ComponentConfig) -> str:
    """Return the name of a configuration in messages."""
    return "-".join(filter(None, (config.name, getattr(config, "similarity", None))))
