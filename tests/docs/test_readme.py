"""What the README and the recipes tell people to type is what the program takes."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from dmlkit.cli.app import app
from tests.conftest import ROOT
from tests.datasets import trees

COMMAND = re.compile(r"^\s*(?:#\s*Run:\s*|@|\$\(BIN\)/|\.venv/bin/)?(dmlkit (?:[^\n\\]|\\\n)*)", re.MULTILINE)


def commands() -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for path in [ROOT / "README.md", ROOT / "Makefile", *sorted((ROOT / "recipes").rglob("*.yaml"))]:
        text = path.read_text().replace("$(BIN)/", "")
        text = re.sub(r"^\s*\|.*$", "", text, flags=re.MULTILINE)  # the table of commands is prose
        for match in COMMAND.finditer(text):
            found.append((path.name, match[1].replace("\\\n", " ").split("  #")[0]))
    return found


@pytest.mark.parametrize(("source", "command"), commands())
def test_commands_parse(source: str, command: str):
    arguments = shlex.split(command)[1:]
    group = get_command(app)
    name, *rest = arguments
    group.commands[name].make_context(name, rest)


def test_the_library_example_runs():
    code, _ = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    scope: dict[str, object] = {}
    exec(code, scope)
    assert scope["loss"].proxies.grad.isfinite().all()


@pytest.mark.slow
def test_the_example_of_commands_as_functions_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    pytest.importorskip("lancedb", reason="the extra dmlkit[lancedb] is not installed")
    monkeypatch.chdir(tmp_path)  # where no recipes are
    for seed, name in enumerate(("robin", "wren")):
        trees.photo(Path("photos") / name / "1.jpg", seed)
    _, code = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    exec(code, {})
    figures, shape, answers = capsys.readouterr().out.splitlines()
    recall, low, high = map(float, re.findall(r"[\d.]+", figures))
    assert low <= recall <= high and shape == "(2, 2)" and answers == "{'photos/wren/1.jpg': 'wren'}"


def leaves(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from leaves(command, (*path, name))
        else:
            yield " ".join((*path, name)), command


def test_every_option_is_explained():
    for name, command in leaves(get_command(app)):
        assert command.help, name
        for paragraph in command.help.split("\n\n")[1:]:  # typer keeps their line breaks
            lines = paragraph.splitlines()
            assert len(lines) == 1 or max(map(len, lines)) <= 78, f"{name}: lines that break again at 80 columns"
        assert command.epilog and f"dmlkit {name}" in command.epilog, f"{name}: --help needs an example"
        for parameter in command.params:
            if parameter.name not in ("device", "help"):
                assert parameter.help, f"{name}: {parameter.name}"
