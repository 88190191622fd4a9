"""Meanings of the keys of a model: the docstrings below them, read on demand.

Pydantic would read them whenever a class is defined, which would add 0.3 s to the start of every command.
"""

import ast
from collections.abc import Iterator
from functools import cache
from inspect import cleandoc, getsource
from itertools import pairwise
from textwrap import dedent
from typing import Any

from pydantic import BaseModel

from dmlkit.component import Component


def meanings_of(model: type[BaseModel]) -> dict[str, str]:
    """Return the docstring below each key, including inherited keys; without source code, there are none.

    Example:
        >>> from dmlkit.datasets import GlyphsConfig
        >>> meanings_of(GlyphsConfig)["size"]
        'Side of an image, in pixels.'
    """
    component: type[Any] | None = getattr(model, "component", None)
    keys = {} if component is None else {one.attribute: key for key, one in component.options_by_key.items()}
    classes = model.__mro__ if component is None else (*component.__mro__, *model.__mro__)
    owners = (owner for owner in reversed(classes) if issubclass(owner, BaseModel | Component))
    found = {keys.get(name, name): meaning for owner in owners for name, meaning in _own_meanings(owner)}
    return {name: found[name] for name in model.model_fields if name in found}


@cache
def _own_meanings(owner: type) -> tuple[tuple[str, str], ...]:
    try:
        source = getsource(owner)
    except (OSError, TypeError):  # a class defined at a prompt
        return ()
    (statement,) = ast.parse(dedent(source)).body
    return tuple(_documented(statement.body if isinstance(statement, ast.ClassDef) else []))


def _documented(body: list[ast.stmt]) -> Iterator[tuple[str, str]]:
    for key, below in pairwise(body):
        match key, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                yield name, cleandoc(text)
            case _:
                pass
