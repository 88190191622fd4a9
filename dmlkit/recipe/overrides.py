"""Recipe files that extend another one, and overrides of keys; every value keeps its file and line."""

import re
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dmlkit.errors import UserError
from dmlkit.files.escape import excerpt, printable
from dmlkit.recipe.faults import OPTION, quoted
from dmlkit.recipe.shipped import find_recipe
from dmlkit.recipe.yaml_tree import MAX_DEPTH, MERGE_KEY, NO_MERGE, Key, Tree, parse_yaml, read_yaml

EXTENDS = "extends"


def read_tree(path: Path) -> Tree:
    """Read a recipe file, merged over the file that its ``extends`` names; see `overlay`.

    The path in ``extends`` is relative to the file's folder, and must be below the parent of that folder, so that
    recipes can extend only recipes of the same collection.

    Raises:
        UserError: a file cannot be read or is not YAML, or the extended file is missing, outside the collection, or
            extends another file itself.
    """
    path = find_recipe(path)
    tree = read_yaml(path, "recipe", f"{path}: no such file; expected a recipe")
    if not isinstance(tree.data, dict) or EXTENDS not in tree.data:
        return tree
    where = f"{tree.origin((EXTENDS,))}: {EXTENDS}"
    base_path = path_in_collection(where, tree.data.pop(EXTENDS), path)
    missing = f"{where}: {base_path}: no such file; expected the path of a recipe from {path.parent}/"
    base = read_yaml(base_path, "recipe", missing)
    if not isinstance(base.data, dict):
        raise UserError(f"{base.origin(())}: this file has no keys; expected a recipe, because {path} extends it")
    if EXTENDS in base.data:
        raise UserError(
            f"{base.origin((EXTENDS,))}: {EXTENDS}: {path} extends this file, which therefore must not extend another; "
            "remove one of the two keys"
        )
    return overlay(base, tree)


def overlay(base: Tree, own: Tree) -> Tree:
    """Merge ``own`` over ``base``: mappings are merged key by key, other values are replaced.

    A mapping with another ``name`` than the base's is another component with other keys, so it replaces the base's
    mapping. A list replaces the base's list.

    Example:
        >>> from dmlkit.recipe.yaml_tree import parse_yaml
        >>> base = parse_yaml("{optimizer: {name: adam, lr: 1e-4, eps: 0.01}, metrics: [a, b]}", "base.yaml")
        >>> overlay(base, parse_yaml("{optimizer: {lr: 1e-3}, metrics: [c]}", "own.yaml")).data
        {'optimizer': {'name': 'adam', 'lr': 0.001, 'eps': 0.01}, 'metrics': ['c']}
        >>> overlay(base, parse_yaml("optimizer: {name: adamw}", "own.yaml")).data
        {'optimizer': {'name': 'adamw'}, 'metrics': ['a', 'b']}
    """
    replaced: set[Key] = set()
    data = _overlay(base.data, own.data, (), replaced)
    kept = {key: origin for key, origin in base.origins.items() if not _is_below(key, replaced)}
    return Tree(own.source, data, kept | own.origins)


def _overlay(base: Any, own: Any, key: Key, replaced: set[Key]) -> Any:
    if not (isinstance(base, dict) and isinstance(own, dict)) or _is_another_member(base, own):
        replaced.add(key)
        return own
    merged = {name: _overlay(base[name], own[name], (*key, name), replaced) for name in own if name in base}
    return base | own | merged


def _is_another_member(base: dict[str, Any], own: dict[str, Any]) -> bool:
    return "name" in base and "name" in own and base["name"] != own["name"]


def _is_below(key: Key, replaced: set[Key]) -> bool:
    return any(key[:length] in replaced for length in range(len(key) + 1))


def path_in_collection(where: str, name: Any, path: Path) -> Path:
    """Return the path of a file that another file of the same collection names.

    Args:
        name: path relative to the folder of ``path``.

    Raises:
        UserError: the name is not a relative path, or leads out of the parent of the file's folder, also by a symbolic
            link.
    """
    if not isinstance(name, str) or not name or "\0" in name:
        raise UserError(f"{where}: got {quoted(name)}, expected the path of a recipe file, e.g. _base.yaml")
    if Path(name).is_absolute():
        raise UserError(
            f"{where}: {excerpt(name)} is absolute; expected a path relative to {path.parent}/, e.g. _base.yaml"
        )
    folder = path.parent.resolve()
    try:
        base = (folder / name).resolve()  # with symbolic links followed
    except RuntimeError as error:  # before Python 3.13, for a loop of links
        raise UserError(f"{where}: cannot follow {excerpt(name)}: {error}") from None
    if not base.is_relative_to(folder.parent):
        raise UserError(f"{where}: {excerpt(name)} is outside {folder.parent}; expected a file inside this folder")
    return path.parent / name


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
