"""Recipes that come with dmlkit, by names such as ``glyphs/proxy_anchor``."""

import re
from difflib import get_close_matches
from pathlib import Path

from dmlkit.errors import UserError
from dmlkit.files.atomic import atomic_write
from dmlkit.recipe.headers import find_recipes

EXTENDS_LINE = re.compile(r"^extends:\s*(\S+)", re.MULTILINE)


def shipped_recipes() -> Path:
    """Return the folder of these recipes: inside the installed package, or next to the package in a clone."""
    package = Path(__file__).parent.parent
    inside = package / "_recipes"
    return inside if inside.is_dir() else package.parent / "recipes"


def names_of_recipes() -> list[str]:
    """Return the names of all recipes that come with dmlkit.

    Example:
        >>> "glyphs/proxy_anchor" in names_of_recipes()
        True
    """
    papers = find_recipes(shipped_recipes()).items()
    return [f"{paper.name}/{header.path.stem}" for paper, headers in papers for header in headers]


def find_recipe(path: Path) -> Path:
    """Return the file of a recipe, given its path or its name.

    Raises:
        UserError: there is neither such a file nor such a recipe.
    """
    if path.exists():
        return path
    name, names = path.as_posix(), names_of_recipes()
    if name in names:
        return shipped_recipes() / f"{name}.yaml"
    near = get_close_matches(name.removesuffix(".yaml").removeprefix("recipes/"), names, n=1, cutoff=0.8)
    hint = (
        f"; did you mean {near[0]}, which comes with dmlkit?" if near else " or a name that dmlkit list recipes shows"
    )
    raise UserError(f"{path}: no such file; expected a recipe{hint}")


def copy_recipe(name: str, target: Path) -> list[Path]:
    """Copy a recipe to a new file, and the file that it extends next to it, under a unique name.

    Args:
        name: name of the recipe.
        target: path of the new file.

    Returns:
        The written files.

    Raises:
        UserError: there is no such recipe, or a file to write already exists with other content.
    """
    names = names_of_recipes()
    if name not in names:
        near = get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "run dmlkit list recipes to see the names"
        raise UserError(f"copy: dmlkit has no recipe {name!r}; {hint}")
    source = shipped_recipes() / f"{name}.yaml"
    text = source.read_text(encoding="utf-8")
    texts: dict[Path, str] = {}
    if extends := EXTENDS_LINE.search(text):
        base = (source.parent / extends[1]).resolve()
        base_copy = target.with_name(f"{base.parent.name}_{base.name.lstrip('_')}")
        texts[base_copy] = base.read_text(encoding="utf-8")
        text = text.replace(extends[0], f"extends: {base_copy.name}")
    texts[target] = text
    for path, content in texts.items():
        if path.exists() and (not path.is_file() or path.read_text(encoding="utf-8", errors="replace") != content):
            raise UserError(f"copy: {path} already exists; use another FILE: dmlkit copy {name} FILE")
    for path, content in texts.items():
        with atomic_write(path) as partial:
            partial.write_text(content, encoding="utf-8")
    return list(texts)
