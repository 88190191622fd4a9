"""Meanings of the keys of a model: the docstrings below them, read on demand.

Pydantic would read them whenever a class is defined, which would add 0.3 s to the start of every command.
"""

import ast
from collections.abc import Iterator
from inspect import cleandoc, getsource
from itertools import pairwise
from textwrap import dedent

from pydantic import BaseModel


def meanings_of(model: type[BaseModel]) -> dict[str, str]:
    """Return the docstring below each key, including inherited keys; without source code, there are none.

    Example:
        >>> from dmlkit.datasets import GlyphsConfig
        >>> meanings_of(GlyphsConfig)["size"]
        'Side of an image, in pixels.'
    """
    owners = (owner for owner in reversed(model.__mro__) if issubclass(owner, BaseModel) and owner is not BaseModel)
    found = {name: meaning for owner in owners for name, meaning in _own_meanings(owner)}
    return {name: found[name] for name in model.model_fields if name in found}


def _own_meanings(owner: type[BaseModel]) -> Iterator[tuple[str, str]]:
    try:
        source = getsource(owner)
    except (OSError, TypeError):  # a class defined at a prompt
        return
    (statement,) = ast.parse(dedent(source)).body
    for key, below in pairwise(statement.body if isinstance(statement, ast.ClassDef) else ()):
        match key, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                yield name, cleandoc(text)
            case _:
                pass
