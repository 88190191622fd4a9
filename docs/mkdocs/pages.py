"""Generated pages of the site: the options of commands, the API reference, and files outside docs/."""

import importlib
import inspect
import posixpath
import re
import sys
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from typer.main import get_command

from dmlkit.cli.app import app
from dmlkit.recipe.schema import FAMILIES

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(HERE))  # for the equations

from equations import rendered  # noqa: E402

ELSEWHERE = {
    "README.md": "readme.md",
    "CONTRIBUTING.md": "contributing.md",
    "AGENTS.md": "agents.md",
    "CHANGELOG.md": "changes.md",
    "SECURITY.md": "security.md",
    **{
        f"benchmarks/results/{path.name}": f"benchmarks/{path.name}"
        for path in (ROOT / "benchmarks/results").glob("*.md")
    },
}
"""Files outside docs/ and the pages that show them."""
ROOMS = {
    "python": ("Python API", ["dmlkit", "dmlkit.errors"]),
    "embeddings": (
        "Embeddings, search and stores",
        [
            "dmlkit.vectors",
            "dmlkit.vectors.folder",
            "dmlkit.nearest.search",
            "dmlkit.vectors.index_vectors",
            "dmlkit.identify.answers",
            "dmlkit.identify.identify",
        ],
    ),
    "recipe": ("Recipes", ["dmlkit.recipe.schema", "dmlkit.recipe.file", "dmlkit.recipe.plugin"]),
    "testing": ("Contracts", ["dmlkit.testing"]),
}
LINK = re.compile(r"(\]\()([^)#\s:]+)((?:#[^)\s]*)?\))")


def api_pages() -> dict[str, str]:
    """Return the pages of the reference by name: one per family, and one per package for programs."""
    families = {name: (name.capitalize(), [kind.__module__.removesuffix(".base")]) for name, kind in FAMILIES.items()}
    return {f"api/{name}.md": api_page(title, modules) for name, (title, modules) in (ROOMS | families).items()}


def api_page(title: str, modules: list[str]) -> str:
    """Return a page with one section per exported member of the modules."""
    text = f"# {title}\n"
    for module in modules:
        loaded = importlib.import_module(module)
        names = getattr(loaded, "__all__", None) or [
            name for name, kind in vars(loaded).items() if getattr(kind, "__module__", "") == module and name[0] != "_"
        ]
        text += f"\n## `{module}`\n\n{(loaded.__doc__ or '').partition(chr(10))[0]}\n"
        text += "".join(f"\n::: {module}.{name}\n    options:\n      heading_level: 3\n" for name in names)
    return text


def options_of(words: list[str]) -> str:
    """Return a table of the arguments and options of a command."""
    command: Any = get_command(app)
    for word in words:
        command = command.commands[word]
    if hasattr(command, "commands"):
        return "".join(f"\n### `{' '.join([*words, name])}`\n{options_of([*words, name])}" for name in command.commands)
    hints = get_type_hints(inspect.unwrap(command.callback))
    rows = ["", command.help, "", "| option | meaning |", "|---|---|"]
    for parameter in command.params:
        named = parameter.metavar or parameter.name.upper()
        shown = named if parameter.param_type_name == "argument" else ", ".join(parameter.opts)
        hint = hints.get(parameter.name)
        choices = next((get_args(kind) for kind in (hint, *get_args(hint)) if get_origin(kind) is Literal), ())
        meaning = parameter.help or ("Device to compute on." if parameter.name == "device" else "")
        allowed = f" One of {', '.join(f'`{choice}`' for choice in choices)}." if choices else ""
        rows.append(f"| `{escaped(shown, '|')}` | {escaped(meaning, '|*_<[')}{allowed} |")
    return "\n".join(rows) + "\n"


def escaped(text: str, marks: str) -> str:
    """Escape the marks that have a meaning in Markdown."""
    return re.sub(f"([{re.escape(marks)}])", r"\\\1", text)


def place_of(uri: str) -> str:
    """Return the path of the file of a page within the project."""
    return next((place for place, page in ELSEWHERE.items() if page == uri), f"docs/{uri}")


def with_links(markdown: str, uri: str) -> str:
    """Replace links between files of the project by links between pages."""
    place = place_of(uri)

    def moved(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(place), found[2]))
        page = ELSEWHERE.get(target, target.removeprefix("docs/"))
        return f"{found[1]}{posixpath.relpath(page, posixpath.dirname(uri) or '.')}{found[3]}"

    return LINK.sub(moved, markdown)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List the pages of commands, of the reference and of benchmarks in the navigation."""
    commands = [f"commands/{name}.md" for name in get_command(app).commands]  # pyright: ignore
    benchmarks = sorted(page for page in ELSEWHERE.values() if page.startswith("benchmarks/"))
    listed = {"Commands": commands, "Reference": sorted(api_pages()), "Benchmarks": benchmarks}
    for section in config.nav or []:
        for title, pages in section.items():
            pages += listed.get(title, [])
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not files in docs/, and the links of llms.txt as addresses of the site."""
    for place, uri in ELSEWHERE.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / place)))
    for uri, text in api_pages().items():
        files.append(File.generated(config, uri, content=text))
    listed = with_links((ROOT / "docs/llms.txt").read_text(encoding="utf-8"), "llms.txt")
    if source := files.get_file_from_path("llms.txt"):
        files.remove(source)
    addresses = {file.src_uri: file.url for file in files.documentation_pages()}
    listed = LINK.sub(lambda found: f"{found[1]}{addresses[found[2]]}{found[3]}", listed)
    files.append(File.generated(config, "llms.txt", content=listed))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Adapt links, and add its options to the page of a command."""
    uri = page.file.src_uri
    if uri.startswith("commands/"):
        markdown += f"\n## Options\n{options_of([Path(uri).stem])}"
    return with_links(markdown, uri)


def on_page_content(html: str, **_: Any) -> str:
    """Render equations."""
    return rendered(html)
