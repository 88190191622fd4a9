"""Recipe files that extend another file, one level deep; every value keeps its file and line."""

from pathlib import Path
from typing import Any

from dmlkit.errors import UserError
from dmlkit.files.escape import excerpt
from dmlkit.recipe.faults import quoted
from dmlkit.recipe.shipped import find_recipe
from dmlkit.recipe.yaml_tree import Key, Tree, read_yaml

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
