"""Headers of recipes, from the comment at the start of each file."""

import re
from dataclasses import dataclass
from pathlib import Path

from dmlkit.errors import UserError

IS_RECIPE = re.compile(r"^(extends|loss):", re.MULTILINE)
COMMENT = re.compile(r"#\s?(.*)")
PUBLISHED = re.compile(r"published:\s*(.+)", re.IGNORECASE)


@dataclass(frozen=True)
class RecipeHeader:
    """Header of a recipe.

    Args:
        path: path of the file.
        summary: first line of the comment at the start of the file.
        published: first line of the figures that a paper reports, if the comment has them.
    """

    path: Path
    summary: str
    published: str


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
