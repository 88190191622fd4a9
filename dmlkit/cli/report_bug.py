"""``dmlkit report-bug``: what the form for bugs asks for, without paths and names."""

import platform
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from dmlkit import __version__
from dmlkit.cli.options import command
from dmlkit.cli.recipes import find_reference
from dmlkit.errors import UserError
from dmlkit.files.escape import printable
from dmlkit.files.source import require_run

HIDDEN = "..."
OWN_NAMES = ("backbone", "model"), ("metrics",)  # keys below which texts are names of timm and of metrics
FOR_DEVELOPMENT = re.compile("extra == .(dev|docs)")
NAME = re.compile(r"[^\w.-]")  # what follows the name of a package
PLAIN = re.compile(r"[\w.@]+")
PATH = re.compile(r"(?<![^\s:;,'\"()])[^\s:;,'\"()/\\]*[/\\][^\s:;,'\"()]*")


@command("dmlkit report-bug recipe.yaml")
def report_bug(
    source: Annotated[Path | None, "[RUN|RECIPE]", "Run, or YAML file of a recipe, with the problem."] = None, /
) -> None:
    """Print what the form for bugs asks for: versions, a recipe, and its first error, without paths and names."""
    error, recipe = ("", "") if source is None else error_and_recipe(source)
    sections = {
        "The first line of the error": error or "none when the recipe is read; paste the line of your command here",
        "The recipe": recipe or "none",
        "Output of dmlkit --version": "\n".join(versions()),
    }
    lines = {title: map(printable, text.rstrip().split("\n")) for title, text in sections.items()}
    typer.echo("\n\n".join("\n".join([f"# {title}", *text]) for title, text in lines.items()))


def versions() -> Iterator[str]:
    """Yield the versions of dmlkit, of Python with its system, and of each package that dmlkit uses and finds."""
    from importlib.metadata import PackageNotFoundError, requires, version

    yield f"dmlkit {__version__}"
    yield f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    used = [line for line in requires("dmlkit") or () if not FOR_DEVELOPMENT.search(line)]
    for name in dict.fromkeys(NAME.split(line)[0] for line in used):
        with suppress(PackageNotFoundError):
            yield f"{name} {version(name)}"


def error_and_recipe(source: Path) -> tuple[str, str]:
    """Return the first line of the error of a recipe, empty if it has none, and its text, without paths and names."""
    from dmlkit.recipe.overrides import find_recipe, read_tree

    if source.is_dir():
        require_run(source)
    file = source / "recipe.yaml" if source.is_dir() else find_recipe(source)

    import yaml

    from dmlkit.recipe.file import read_recipe

    hidden, recipe, error = {str(file)}, "", ""
    try:
        shown = without_names(read_tree(file).data, known_texts(find_reference().schema), hidden)
        recipe = yaml.safe_dump(shown, sort_keys=False, default_flow_style=None, width=100)
        read_recipe(file, is_trained=source.is_dir())
    except Exception as caught:  # of a plug-in too
        error = ("" if isinstance(caught, UserError) else f"{type(caught).__name__}: ") + str(caught).partition("\n")[0]
    for text in sorted(hidden, key=len, reverse=True):
        error = re.sub(rf"(?<!\w){re.escape(text)}(?!\w)", HIDDEN, error)
    return PATH.sub(HIDDEN, error), recipe


def known_texts(schema: Any) -> set[str]:
    """Return every name, choice and default in the JSON schema of recipes."""
    if isinstance(schema, list):
        return set().union(*map(known_texts, schema))
    if not isinstance(schema, dict):
        return set()
    values = [schema.get("const"), schema.get("default"), *schema.get("enum", ())]
    return {text for text in values if isinstance(text, str)}.union(*map(known_texts, schema.values()))


def without_names(value: Any, known: set[str], hidden: set[str], key: tuple[str, ...] = ()) -> Any:
    """Return plain data with ``...`` for each text that is no name of dmlkit's own; these texts are put in ``hidden``.

    Example:
        >>> hidden = set()
        >>> without_names({"dataset": {"name": "folder", "root": "/home/ada"}, "seed": 3}, {"folder"}, hidden), hidden
        ({'dataset': {'name': 'folder', 'root': '...'}, 'seed': 3}, {'/home/ada'})
    """
    if isinstance(value, dict):
        return {name: without_names(part, known, hidden, (*key, str(name))) for name, part in value.items()}
    if isinstance(value, list):
        return [without_names(part, known, hidden, key) for part in value]
    is_own = value in known or (key in OWN_NAMES and PLAIN.fullmatch(str(value)))
    if not isinstance(value, str) or is_own or not value:
        return value
    hidden.add(value)
    return HIDDEN
