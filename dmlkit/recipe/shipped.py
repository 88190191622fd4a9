"""Recipes that come with dmlkit, by names such as ``glyphs/proxy_anchor``."""

import re
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from dmlkit.errors import UserError
from dmlkit.files.atomic import write_text

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
    """Copy a recipe to a new file, and the file that it extends next to it, under a unique name; return the files.

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
        write_text(path, content)
    return list(texts)


IS_RECIPE = re.compile(r"^(extends|loss):", re.MULTILINE)
COMMENT = re.compile(r"#\s?(.*)")
PUBLISHED = re.compile(r"published:\s*(.+)", re.IGNORECASE)


@dataclass(frozen=True)
class RecipeHeader:
    """Header of a recipe."""

    path: Path
    summary: str  # first line of the comment at the start of the file
    published: str  # first line of the figures that a paper reports, if the comment has them


def find_recipes(root: Path) -> dict[Path, list[RecipeHeader]]:
    """Return the headers of all recipes below a folder, by subfolder; files that begin with ``_`` are only extended.

    Raises:
        UserError: there is no such folder, or it has no recipe.
    """
    if not root.is_dir():
        raise UserError(f"{root}: no such folder; expected a folder of recipes")
    found: dict[Path, list[RecipeHeader]] = {}
    for path in sorted(root.rglob("*.yaml")):
        text = "" if path.name.startswith("_") else path.read_text(encoding="utf-8", errors="replace")
        if IS_RECIPE.search(text):
            found.setdefault(path.parent, []).append(read_header(path, text))
    if not found:
        raise UserError(f"{root} contains no recipes; expected .yaml files with a dataset and a loss")
    return found


def read_header(path: Path, text: str) -> RecipeHeader:
    r"""Parse the header of a recipe's text.

    Example:
        >>> text = "# Triplet on birds: Table 3.\n# Published: R@1 49.4\n#            NMI 57.2\nloss: {name: triplet}\n"
        >>> read_header(Path("birds.yaml"), text)
        RecipeHeader(path=PosixPath('birds.yaml'), summary='Triplet on birds: Table 3.', published='R@1 49.4')
    """
    comment: list[str] = []
    for line in text.splitlines():
        match = COMMENT.fullmatch(line)
        if match is None:
            break
        if not match[1].startswith("yaml-language-server:"):
            comment.append(match[1].strip())
    published = (match[1] for line in comment if (match := PUBLISHED.fullmatch(line)))
    return RecipeHeader(path, next(iter(comment), ""), next(published, ""))
