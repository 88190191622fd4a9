"""A promise: a function that raises AssertionError where a component breaks what its first line says."""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, get_args

import torch
from torch import Tensor
from torch.testing import assert_close

from dmlkit.component import ComponentConfig, Requirement
from dmlkit.manifolds.base import ManifoldConfig

Promise = Callable[..., None]
DIM = 8  # features of the manifolds that components are tried on


def hold(promises: Sequence[Promise], subject: str, *arguments: Any) -> None:
    """Hold a component to its promises; the random numbers of the caller stay as they are.

    Args:
        promises: each is called with the arguments.
        subject: names the component in messages.
        arguments: its configuration, and what it is tried with.

    Raises:
        AssertionError: names the component, the promise, and how it is broken.

    Example:
        >>> def is_small(number):
        ...     "It is below 5."
        ...     expect(number < 5, f"got {number}")
        >>> hold([is_small], "seven", 7)
        Traceback (most recent call last):
        ...
        AssertionError: seven: is_small: it is below 5: got 7
    """
    for promise in promises:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            try:
                promise(*arguments)
            except Exception as error:  # a component may fail in any way
                told = f"{error}" if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
                line = (promise.__doc__ or "").strip().partition("\n")[0].rstrip(".")
                words = f"{promise.__name__}: {line[:1].lower()}{line[1:]}"
                raise AssertionError(f"{subject}: {words}: {told}") from error


def expect(holds: bool | Tensor, message: str) -> None:
    """Raise an AssertionError, also under ``python -O``, which leaves out assert.

    Args:
        holds: true, or a tensor that is.
        message: says what was found.
    """
    if not bool(holds):
        raise AssertionError(message)


def expect_close(found: Any, expected: Any, what: str, *, atol: float | None = None, rtol: float | None = None) -> None:
    """Compare tensors with `torch.testing.assert_close`, and name them where they differ."""
    assert_close(found, expected, atol=atol, rtol=rtol, msg=lambda text: f"{what}: {' '.join(text.split())}")


def expect_refused(call: Callable[[], object], error: type[Exception], pattern: str, what: str) -> None:
    """Make sure that a call raises an error whose message fits a pattern."""
    try:
        call()
    except error as refusal:
        told = str(refusal)
        expect(re.search(pattern, told) is not None, f"{what}: expected a message like {pattern}, got {told}")
    else:
        raise AssertionError(f"{what}: expected {error.__name__}, and nothing was raised")


def a_line_of_help_says_what_it_is(config: ComponentConfig, *_: object) -> None:
    """The configuration's docstring begins with a line, which ``dmlkit list`` shows."""
    expect(bool((type(config).__doc__ or "").split("\n")[0].strip()), f"{type(config).__name__} has no docstring")


def changed(config: Any, **options: Any) -> Any:
    """A configuration with other options, checked.

    Raises:
        ValueError: an option is out of range.
    """
    return type(config)(**{**dict(config), **options})


def has_defaults(config: ComponentConfig) -> bool:
    """Whether a member can be configured by its name alone."""
    return not any(field.is_required() for field in type(config).model_fields.values())


def requirements(component: ComponentConfig) -> Iterator[Requirement]:
    """What a component requires, and those nested in it, such as a loss's miner."""
    yield from component.requirements()
    for value in dict(component).values():
        if isinstance(value, ComponentConfig):
            yield from requirements(value)


def all_manifolds() -> Iterator[ManifoldConfig]:
    """Every manifold that is known, with each of its similarities."""
    for variant in ManifoldConfig.variants.values():
        for similarity in get_args(variant.model_fields["similarity"].annotation):
            yield variant(similarity=similarity)


def fits(component: ComponentConfig, manifold: ManifoldConfig) -> bool:
    """Whether a component's requirements allow a manifold."""
    needs = [need for need in requirements(component) if need.key.startswith("manifold.")]
    return all(getattr(manifold, need.key.removeprefix("manifold."), None) in need.allowed for need in needs)


def fitting_manifolds(component: ComponentConfig) -> list[ManifoldConfig]:
    """The manifolds that a component takes, the sphere's first.

    Raises:
        AssertionError: there is none.
    """
    found = sorted((one for one in all_manifolds() if fits(component, one)), key=lambda one: one.name != "sphere")
    expect(bool(found), f"{component.name}: its requirements allow no manifold that is known")
    return found


def title(config: ComponentConfig) -> str:
    """How messages name a configuration."""
    return "-".join(filter(None, (config.name, getattr(config, "similarity", None))))
