"""Recipe files: those that come with dmlkit, files that extend another one, and overrides of keys.

Shipped recipes have names such as ``glyphs/proxy_anchor``. Every value keeps its file and line.
"""

import re
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import takewhile
from pathlib import Path
from typing import Any

from dmlkit._deprecated import KEYS, warn_of
from dmlkit.errors import UserError, require_list
from dmlkit.files.escape import excerpt, printable, quoted
from dmlkit.files.outputs import check_place, write_output
from dmlkit.files.yaml_tree import MAX_DEPTH, MERGE_KEY, NO_MERGE, Key, Tree, parse_yaml, read_yaml
from dmlkit.recipe.faults import OPTION

EXTENDS = "extends"
MARKS = {"recipe": ("loss", "train"), "study": ("variants", "study")}
"""For each kind of file, a key that only it has, and the command that reads it."""


def read_tree(path: Path, complete: Callable[[Tree], None] = lambda _: None) -> Tree:
    """Read a recipe, given its path or its name; see `read_extended`."""
    return read_extended(find_recipe(path), "recipe", complete)


def read_extended(path: Path, kind: str, complete: Callable[[Tree], None] = lambda _: None) -> Tree:
    """Read the file of a recipe or of a study, merged over the file that its ``extends`` names; see `overlay`.

    The path in ``extends`` is relative to the file's folder, and must be below the parent of that folder, so that
    files can extend only files of the same collection. ``complete`` adds to the other file what it has by default.
    """
    tree = read_yaml(path, kind, f"{path}: no such file; expected a {kind}")
    if not isinstance(tree.data, dict):
        return tree
    other, (key, command) = next(item for item in MARKS.items() if item[0] != kind)
    if key in tree.data:
        raise UserError(f"{path}: got a {other}, expected a {kind}; use dmlkit {command} for it")
    if EXTENDS not in tree.data:
        return tree
    where = f"{tree.origin((EXTENDS,))}: {EXTENDS}"
    name = tree.data.pop(EXTENDS)
    base_path = path_in_collection(where, name, path)
    hint = shipped_hint(name) if kind == "recipe" else ""
    missing = f"{where}: {base_path}: no such file; expected the path of a {kind} from {path.parent}/{hint}"
    base = read_yaml(base_path, kind, missing)
    if not isinstance(base.data, dict):
        raise UserError(f"{base.origin(())}: this file has no keys; expected a {kind}, because {path} extends it")
    is_shipped = base_path == shipped_recipe(name)  # the mark of a recipe may be in what it extends
    if key in base.data or (is_shipped and kind == "study"):
        raise UserError(f"{base_path}: got a {other}, expected a {kind}, because {path} extends it")
    if EXTENDS in base.data:
        remedy = f"change a copy: dmlkit copy {name} FILE" if is_shipped else "remove one of the two keys"
        raise UserError(
            f"{base.origin((EXTENDS,))}: {EXTENDS}: {path} extends this file, which therefore must not extend another; "
            f"{remedy}"
        )
    complete(base)
    return overlay(base, tree)


def overlay(base: Tree, changes: Tree) -> Tree:
    """Merge ``changes`` over ``base``: mappings are merged key by key, other values are replaced.

    A mapping with another ``name`` than the base's is another component with other keys, so it replaces the base's
    mapping. A list replaces the base's list.
    """
    replaced: set[Key] = set()
    data = _overlay(base.data, changes.data, (), replaced)
    inherited = {
        key: origin
        for key, origin in base.origins.items()
        if not any(key[:length] in replaced for length in range(len(key) + 1))
    }
    return Tree(changes.source, data, inherited | changes.origins)


def _overlay(base: Any, changes: Any, key: Key, replaced: set[Key]) -> Any:
    are_mappings = isinstance(base, dict) and isinstance(changes, dict)
    if not are_mappings or base.get("name", changes.get("name")) != changes.get("name", base.get("name")):
        replaced.add(key)
        return changes
    merged = {name: _overlay(base[name], changes[name], (*key, name), replaced) for name in changes if name in base}
    return base | changes | merged


def path_in_collection(where: str, name: Any, path: Path) -> Path:
    """Return the path of a file that another file of the same collection names, or of a recipe of dmlkit's."""
    if not isinstance(name, str) or not name or "\0" in name:
        raise UserError(f"{where}: got {quoted(name)}, expected the path of a file, e.g. _base.yaml")
    if Path(name).is_absolute():
        raise UserError(
            f"{where}: {excerpt(name)} is absolute; expected a path relative to {path.parent}/, e.g. _base.yaml"
        )
    folder = path.parent.resolve()
    try:
        base = (folder / name).resolve()  # with symbolic links followed
    except RuntimeError as error:  # before Python 3.13, for a loop of links
        raise UserError(f"{where}: cannot follow {excerpt(name)}: {error}") from None
    if not base.exists() and (shipped := shipped_recipe(name)):
        return shipped
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
    """Replace values of a recipe's tree, in order; a tree that is not a mapping stays, and is reported later."""
    require_list("overrides", overrides)
    if not isinstance(tree.data, dict):
        return
    for override in overrides:
        _apply(tree, parse_override(override) if isinstance(override, str) else override)
    if EXTENDS in tree.data:
        raise UserError(f"{tree.origin((EXTENDS,))}: {EXTENDS}: only a recipe file can extend another")


def rename_keys(tree: Tree) -> None:
    """Replace the old names of keys and members in a recipe's tree, each with a warning."""
    for old, new in KEYS.items():
        name, _, member = old.partition("=")
        key: Key = tuple(name.split("."))
        try:
            value = tree.below(key)
        except (KeyError, TypeError):  # it does not have the key
            continue
        if member:
            if value.data == member:
                _apply(tree, Override(name, Tree(value.source, warn_of(f"{value.source}: {name}: {member}", new))))
            continue
        del tree.below(key[:-1]).data[key[-1]]
        _apply(tree, Override(warn_of(f"{value.source}: {name}", new), value))


def parse_override(text: str) -> Override:
    """Parse a value of ``--set``, ``key.subkey=value``."""
    source = f"{OPTION}{printable(excerpt(text))}"
    key, equals, value = text.partition("=")
    if not equals:
        raise UserError(f"{source}: expected key.subkey=value, e.g. --set loss.margin=0.2")
    return Override(key, parse_yaml(value, source, has_lines=False))


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
    last, value = key[-1], deepcopy(override.value.data)  # the same override may be applied to several recipes
    if isinstance(parent, dict):
        parent[str(last)] = value
    elif isinstance(last, int) and last < len(parent):
        parent[last] = value
    else:
        raise UserError(f"{source}: {excerpt(name)} does not exist in {tree.source}")
    tree.origins = {old: origin for old, origin in tree.origins.items() if old[: len(key)] != key}
    tree.origins.update({key: source} | {(*key, *below): origin for below, origin in override.value.origins.items()})


EXTENDS_LINE = re.compile(r"^extends:\s*(\S+)", re.MULTILINE)


def shipped_recipes() -> Path:
    """Return the folder of these recipes: inside the installed package, or next to the package in a clone."""
    package = Path(__file__).parent.parent
    inside = package / "_recipes"
    return inside if inside.is_dir() else package.parent / "recipes"


def names_of_recipes() -> list[str]:
    """Return the names of all recipes that come with dmlkit."""
    papers = find_recipes(shipped_recipes()).items()
    return [f"{paper.name}/{header.path.stem}" for paper, headers in papers for header in headers]


def shipped_recipe(name: str) -> Path | None:
    """Return the file of a recipe that comes with dmlkit; None if there is none of this name."""
    return shipped_recipes() / f"{name}.yaml" if name in names_of_recipes() else None


def is_recipe(path: Path) -> bool:
    """Return whether a path is meant as a recipe: a YAML file, or the name of one that comes with dmlkit."""
    return path.suffix in (".yaml", ".yml") or (not path.exists() and path.as_posix() in names_of_recipes())


def find_recipe(path: Path) -> Path:
    """Return the file of a recipe, given its path or its name."""
    if path.exists():
        return path
    name = path.as_posix()
    if shipped := shipped_recipe(name):
        return shipped
    raise UserError(f"{path}: no such file; expected a recipe{shipped_hint(name)}")


def shipped_hint(name: str) -> str:
    """Return the end of a message about a file that does not exist: the recipe of dmlkit's that may be meant."""
    typed = name.removesuffix(".yaml").removeprefix("recipes/")
    matches = get_close_matches(typed, names_of_recipes(), n=1, cutoff=0.8)
    found = f"; did you mean {matches[0]}, which comes with dmlkit?" if matches else ""
    return found or " or a name that dmlkit list recipes shows"


def copy_recipe(name: str, target: Path) -> list[Path]:
    """Copy a recipe to a new file, and the file that it extends next to it, under a unique name; return the files."""
    names = names_of_recipes()
    if name not in names:
        matches = get_close_matches(name, names, n=1)
        hint = f"did you mean {matches[0]!r}?" if matches else "run dmlkit list recipes to see the names"
        raise UserError(f"copy: dmlkit has no recipe {name!r}; {hint}")
    source = shipped_recipes() / f"{name}.yaml"
    text = source.read_text(encoding="utf-8")
    texts: dict[Path, str] = {}
    if extends := EXTENDS_LINE.search(text):
        base = (source.parent / extends[1]).resolve()
        base_copy = target.with_name(f"{base.parent.name}_{base.name.lstrip('_')}")
        if base_copy == target:
            raise UserError(f"copy: {target} is the copy of the file that {name} extends; use another FILE")
        texts[base_copy] = base.read_text(encoding="utf-8")
        text = text.replace(extends[0], f"extends: {base_copy.name}")
    texts[target] = text
    for path, content in texts.items():
        if path.exists() and (not path.is_file() or path.read_text(encoding="utf-8", errors="replace") != content):
            raise UserError(f"copy: {path} already exists; use another FILE: dmlkit copy {name} FILE")
    check_place(target, (), option="FILE")
    for path, content in texts.items():
        write_output(path, content)
    return list(texts)


IS_RECIPE = re.compile(r"\A(?!.*?^claim:).*?^(extends|loss):", re.MULTILINE | re.DOTALL)  # a claim is a study's
COMMENT = re.compile(r"#\s?(.*)")
EDITORS = "yaml-language-server:"  # start of a comment for them
PUBLISHED = re.compile(r"published:\s*(.+)", re.IGNORECASE)


@dataclass(frozen=True)
class RecipeHeader:
    """Header of a recipe."""

    path: Path
    summary: str  # first line of the comment at the start of the file
    published: str  # first line of the figures that a paper reports, if the comment has them


def find_recipes(root: Path) -> dict[Path, list[RecipeHeader]]:
    """Return the headers of all recipes below a folder, by subfolder; files that begin with ``_`` are only extended."""
    if not root.is_dir():
        raise UserError(f"{root}: no such folder; expected a folder of recipes")
    headers: dict[Path, list[RecipeHeader]] = {}
    for path in sorted(root.rglob("*.yaml")):
        text = "" if path.name.startswith("_") else path.read_text(encoding="utf-8", errors="replace")
        if IS_RECIPE.search(text):
            matches = takewhile(bool, map(COMMENT.fullmatch, text.splitlines()))
            lines = [match[1].strip() for match in matches if match and not match[1].startswith(EDITORS)]
            published = (match[1] for line in lines if (match := PUBLISHED.fullmatch(line)))
            header = RecipeHeader(path, next(iter(lines), ""), next(published, ""))
            headers.setdefault(path.parent, []).append(header)
    if not headers:
        raise UserError(f"{root} contains no recipes; expected .yaml files with a dataset and a loss")
    return headers
