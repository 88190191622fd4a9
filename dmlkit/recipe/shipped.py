"""The recipes that come with dmlkit, by name: ``glyphs/proxy_anchor``."""

import re
from difflib import get_close_matches
from pathlib import Path

from dmlkit.errors import UserError
from dmlkit.files.atomic import atomic_write
from dmlkit.recipe.headers import find_recipes

EXTENDS_LINE = re.compile(r"^extends:\s*(\S+)", re.MULTILINE)


def shipped_recipes() -> Path:
    """The folder that holds them: in the package where it was installed from a wheel, beside it in a clone."""
    package = Path(__file__).parent.parent
    inside = package / "_recipes"
    return inside if inside.is_dir() else package.parent / "recipes"


def names_of_recipes() -> list[str]:
    """All names, as recipes may be called by.

    Example:
        >>> "glyphs/proxy_anchor" in names_of_recipes()
        True
    """
    papers = find_recipes(shipped_recipes()).items()
    return [f"{paper.name}/{header.path.stem}" for paper, headers in papers for header in headers]


def find_recipe(path: Path) -> Path:
    """The file of a recipe: a path as it is, or the one of a name.

    Raises:
        UserError: there is neither a file nor such a recipe.
    """
    if path.exists():
        return path
    name, names = path.as_posix(), names_of_recipes()
    if name in names:
        return shipped_recipes() / f"{name}.yaml"
    near = get_close_matches(name.removesuffix(".yaml").removeprefix("recipes/"), names, n=1, cutoff=0.8)
    hint = (
        f"; did you mean {near[0]}, which comes with dmlkit?" if near else ", or a name that dmlkit list recipes shows"
    )
    raise UserError(f"{path}: no such file; expected a recipe{hint}")


def copy_recipe(name: str, target: Path) -> list[Path]:
    """Copy a recipe to a file of one's own; what it extends is copied beside it, under a name of its own.

    Args:
        name: of the recipe.
        target: the new file.

    Returns:
        The files written.

    Raises:
        UserError: there is no such recipe, or another file is in the way.
    """
    names = names_of_recipes()
    if name not in names:
        near = get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "dmlkit list recipes shows them"
        raise UserError(f"copy: no recipe {name!r} comes with dmlkit; {hint}")
    source = shipped_recipes() / f"{name}.yaml"
    text = source.read_text(encoding="utf-8")
    texts: dict[Path, str] = {}
    if extends := EXTENDS_LINE.search(text):
        base = (source.parent / extends[1]).resolve()
        beside = target.with_name(f"{base.parent.name}_{base.name.lstrip('_')}")
        texts[beside] = base.read_text(encoding="utf-8")
        text = text.replace(extends[0], f"extends: {beside.name}")
    texts[target] = text
    for path, content in texts.items():
        if path.exists() and (not path.is_file() or path.read_text(encoding="utf-8", errors="replace") != content):
            raise UserError(f"copy: {path} is there already; give another FILE: dmlkit copy {name} FILE")
    for path, content in texts.items():
        with atomic_write(path) as partial:
            partial.write_text(content, encoding="utf-8")
    return list(texts)
