"""What the keys of a model mean: the docstrings below them, read when somebody asks.

Pydantic would read them whenever a class is made, which takes 0.3 s of the start of every command.
"""

import ast
from collections.abc import Iterator
from inspect import cleandoc, getsource
from itertools import pairwise
from textwrap import dedent

from pydantic import BaseModel


def meanings_of(model: type[BaseModel]) -> dict[str, str]:
    """The docstring below each key, also of those that the model has from others; none where there is no source.

    Example:
        >>> from dmlkit.losses import CosFaceConfig
        >>> meanings_of(CosFaceConfig)["margin"]
        'm, in units of the cosine.'
    """
    owners = (owner for owner in reversed(model.__mro__) if issubclass(owner, BaseModel) and owner is not BaseModel)
    found = {name: meaning for owner in owners for name, meaning in _own_meanings(owner)}
    return {name: found[name] for name in model.model_fields if name in found}


def _own_meanings(owner: type[BaseModel]) -> Iterator[tuple[str, str]]:
    try:
        source = getsource(owner)
    except (OSError, TypeError):  # a class typed at a prompt
        return
    (statement,) = ast.parse(dedent(source)).body
    for key, below in pairwise(statement.body if isinstance(statement, ast.ClassDef) else ()):
        match key, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                yield name, cleandoc(text)
            case _:
                pass
