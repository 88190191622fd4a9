"""Overrides of a recipe's keys, from ``--set`` or from a study."""

import re
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from dmlkit.errors import UserError
from dmlkit.files.escape import excerpt, printable
from dmlkit.recipe.extends import EXTENDS
from dmlkit.recipe.faults import OPTION, quoted
from dmlkit.recipe.yaml_tree import MAX_DEPTH, MERGE_KEY, NO_MERGE, Key, Tree, parse_yaml

INDEX = re.compile("[0-9]{1,9}")  # index of a list item, counted from 0


@dataclass(frozen=True)
class Override:
    """Value for a key of a recipe."""

    key: str  # dotted, e.g. ``loss.margin``
    value: Tree  # with its source, which messages name


def apply_overrides(tree: Tree, overrides: Sequence[str | Override]) -> None:
    """Replace values of a recipe's tree, in order; a tree that is not a mapping stays, and is reported later.

    Raises:
        UserError: an override cannot be parsed or applied, or the tree extends another.
    """
    if not isinstance(tree.data, dict):
        return
    for override in overrides:
        _apply(tree, parse_override(override) if isinstance(override, str) else override)
    if EXTENDS in tree.data:
        raise UserError(f"{tree.origin((EXTENDS,))}: {EXTENDS}: only a recipe file can extend another")


def parse_override(text: str) -> Override:
    """Parse a value of ``--set``, ``key.subkey=value``.

    Raises:
        UserError: there is no ``=``, or the value is not valid YAML.
    """
    source = f"{OPTION}{printable(excerpt(text))}"
    key, equals, value = text.partition("=")
    if not equals:
        raise UserError(f"{source}: expected key.subkey=value, e.g. --set loss.margin=0.2")
    parsed = parse_yaml(value, source, has_lines=False)
    return Override(key, parsed)


def _apply(tree: Tree, override: Override) -> None:
    name, source = override.key, override.value.source
    steps = name.split(".")
    if not all(steps) or len(steps) > MAX_DEPTH:
        raise UserError(f"{source}: expected key.subkey=value, e.g. --set loss.margin=0.2")
    if MERGE_KEY in steps:
        raise UserError(f"{source}: {NO_MERGE}")
    key: Key = tuple(int(step) if INDEX.fullmatch(step) else step for step in steps)
    parent: Any = tree.data
    for index, step in enumerate(key[:-1]):
        if isinstance(step, str) and isinstance(parent, dict):
            if step not in parent:
                parent[step] = {}
                tree.origins[key[: index + 1]] = source
            parent = parent[step]
        elif isinstance(step, int) and isinstance(parent, list) and step < len(parent):
            parent = parent[step]
        else:
            raise UserError(f"{source}: {excerpt('.'.join(steps[: index + 1]))} does not exist in {tree.source}")
        if not isinstance(parent, dict | list):
            where = excerpt(".".join(steps[: index + 1]))
            raise UserError(f"{source}: {where} is the value {quoted(parent)}, expected a mapping")
    last = key[-1]
    if isinstance(parent, list) and not (isinstance(last, int) and last < len(parent)):
        raise UserError(f"{source}: {excerpt(name)} does not exist in {tree.source}")
    value = deepcopy(override.value.data)  # the same override may be applied to several recipes
    if isinstance(parent, list):
        parent[int(last)] = value
    else:
        parent[str(last)] = value
    tree.origins = {old: origin for old, origin in tree.origins.items() if old[: len(key)] != key}
    tree.origins.update({key: source} | {(*key, *below): origin for below, origin in override.value.origins.items()})
