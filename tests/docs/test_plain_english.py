"""The prose of pages and docstrings avoids words that a reader has to translate; a table says what to write instead."""

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from dmlkit.study.report import BEGINNING, END
from tests.conftest import ROOT, every_command
from tests.test_architecture import tree_of

INSTEAD = {
    r"told|tells": "report, print, say",
    r"anew": "again",
    r"likewise": "also, the same",
    r"mend(?:s|ed|ing|able)?": "fix, repair",
    r"begun": "started",
    r"somebody(?: else)?['’]s": "name whose it is",
    r"(?:held|holds?) against": "compared with, checked against",
    r"undo that|names no class|parts stay": "undo this change, is not a valid ..., finished parts are kept",
    r"goes on(?! (?:the|top|a)\b)": "continues, resumes",  # "goes on the x axis" is fine
    r"as it is(?=[,.;:)]|$)": "unchanged",  # "as it is written" is fine
}
AVOIDED = re.compile("|".join(rf"\b(?:{words})(?!\w)" for words in INSTEAD), re.IGNORECASE)
PAGES = [
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY", "AGENTS")),
    *sorted(path for path in (ROOT / "docs").rglob("*.md") if path.name != "recipe_keys.md"),  # written from docstrings
]


def avoided(prose: str) -> list[str]:
    """Return the words of the list with some context."""
    prose = " ".join(prose.split())
    return [prose[max(0, found.start() - 30) : found.end() + 20] for found in AVOIDED.finditer(prose)]


def prose_of(page: str) -> str:
    """Leave out code, quoted output, links' targets, and what `dmlkit report` wrote."""
    page = re.sub(rf"^{re.escape(BEGINNING)} .*?^{re.escape(END)}", "", page, flags=re.DOTALL | re.MULTILINE)
    page = re.sub(r"^```.*?^```$", "", page, flags=re.DOTALL | re.MULTILINE)
    page = re.sub(r"^    .*$", "", page, flags=re.MULTILINE)
    page = re.sub(r"`[^`]+`", "`", page)
    return re.sub(r"\]\([^)]+\)", "]", page)


def docstrings_of(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield the docstrings of a module, those below fields and constants too."""
    for node in nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value


def messages_of(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield the texts of the errors that a module raises."""
    for node in nodes:
        if isinstance(node, ast.Raise):
            texts = (
                one.value for one in ast.walk(node) if isinstance(one, ast.Constant) and isinstance(one.value, str)
            )
            yield " ".join(texts)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_pages_are_in_plain_english(page: Path):
    assert avoided(prose_of(page.read_text(encoding="utf-8"))) == [], f"write instead: {INSTEAD}"


@pytest.mark.parametrize("entry", sorted(path.stem for path in (ROOT / "dmlkit").iterdir()))
def test_docstrings_and_errors_are_in_plain_english(entry: str):
    for path in sorted([*(ROOT / "dmlkit").glob(f"{entry}.py"), *(ROOT / "dmlkit" / entry).rglob("*.py")]):
        nodes = list(ast.walk(tree_of(path)))
        assert [words for text in (*docstrings_of(nodes), *messages_of(nodes)) for words in avoided(text)] == [], (
            f"{path.relative_to(ROOT)}; write instead: {INSTEAD}"
        )


def test_help_texts_are_sentences_in_plain_english():
    """A command's help starts with a capital and ends with a full stop; so does the help of each of its options."""
    for words, command in every_command():
        texts = [command.help, *(one.help for one in command.params)]
        assert all(texts), f"{words}: without help"
        for text in texts:
            assert re.match(r"[A-Z0-9.\[-]", text) and text.endswith("."), f"{words}: {text}"
        assert [avoided(text) for text in [*texts, command.epilog or ""] if avoided(text)] == [], words
        if not hasattr(command, "commands"):
            assert f"dmlkit {words}" in command.epilog, f"{words}: --help needs an example"
        for paragraph in command.help.split("\n\n")[1:]:  # typer keeps their line breaks
            lines = paragraph.splitlines()
            assert len(lines) == 1 or max(map(len, lines)) <= 78, f"{words}: lines that break again at 80 columns"
