"""Every command has a page in docs/commands/, whose examples run and print what stands below them.

``DMLKIT_WRITE_PAGES=1 python -m pytest tests/docs/test_commands.py`` writes what they print into the pages.
"""

import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from dmlkit.cli.app import app
from tests.conftest import ROOT
from tests.docs.blocks import blocks_of, page, run_blocks

PAGES = ROOT / "docs" / "commands"
EXAMPLE = re.compile(r"```sh\n([^\n]*)\n```\n\n```text\n(.*?)```", re.DOTALL)
PROGRESS = re.compile(r"^.*: [\d,]+ of [\d,]+, .* s left\n", re.MULTILINE)  # printed every 10 seconds, on slow machines
SHOWN = 28  # lines of what is printed; the rest of it is "..."


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the blocks of docs/commands.md are run, once."""
    return tmp_path_factory.mktemp("docs")


@pytest.fixture
def world(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dmlkit: Callable[..., Any]) -> Path:
    """A folder of its own for each page, as the blocks of docs/commands.md leave it."""
    if not any(prepared.iterdir()):
        monkeypatch.chdir(prepared)
        run_blocks(blocks_of(page("commands"), "sh", "yaml", "python"), dmlkit, lambda _: [])
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def shape_of(line: str) -> str:
    """What of a line is the same on another machine, whose figures and nearest images may be others."""
    line = re.sub(r"[\w./]+\.png\b", "IMAGE", line)
    line = re.sub(r"(?<=│) +[A-H](, [A-H])* +(?=│)", " LABELS ", line)
    line = re.sub(r"(?<=\d )[A-H](?= +│)", "LABEL", line)
    line = re.sub(r"\b[a-z]+(/U\+[0-9A-F]{4})+", "CLASS", line)
    line = re.sub(r"U\+[0-9A-F]{4}", "CHARACTER", line)
    line = re.sub(r"\b[0-9a-f]{8,}\b", "HASH", line)  # of weights, whose last bits are the machine's
    words = "does not hold|holds|makes no difference|not separable at|not trained|equal by construction"
    line = re.sub(rf"({words}).*", "VERDICT", line)
    line = re.sub(r"takes about \d+ (s|min|h)\b", "takes about TIME", line)
    line = re.sub(r"\d[\d.,:e-]*\d|\d", "0", line)
    return " ".join(re.sub(r"[─━═+-]+", "-", line).split())


def shortened(out: str) -> str:
    lines = [line.rstrip() for line in out.rstrip().splitlines()]
    return "\n".join(lines[:SHOWN] + ["..."] * (len(lines) > SHOWN)) + "\n"


def test_every_command_has_a_page_and_nothing_else_has():
    assert {path.stem for path in PAGES.glob("*.md")} == set(get_command(app).commands)


@pytest.mark.heavy
@pytest.mark.parametrize("name", sorted(path.stem for path in PAGES.glob("*.md") if path.stem != "serve"))  # waits
def test_the_examples_print_what_is_shown(name: str, world: Path, dmlkit: Callable[..., Any]):
    if name == "gallery":
        pytest.importorskip("lancedb", reason="the extra dmlkit[lancedb] is not installed")
    path = PAGES / f"{name}.md"
    text = path.read_text(encoding="utf-8")
    examples = list(EXAMPLE.finditer(text))
    assert any(f"dmlkit {name}" in example[1] for example in examples)
    assert len(examples) == text.count("```sh")
    outputs = [PROGRESS.sub("", run_example(example[1], dmlkit)) for example in examples]
    if os.environ.get("DMLKIT_WRITE_PAGES"):
        written: Iterator[str] = iter(outputs)
        path.write_text(
            EXAMPLE.sub(lambda found: f"```sh\n{found[1]}\n```\n\n```text\n{shortened(next(written))}```", text),
            encoding="utf-8",
        )
        return
    for example, out in zip(examples, outputs, strict=True):
        printed = " ".join(map(shape_of, out.splitlines()))  # a line breaks elsewhere from 1,000 images/s on
        missing = [line for line in example[2].splitlines() if line != "..." and shape_of(line) not in printed]
        assert missing == [] and example[2], f"{example[1]} no longer prints this; now\n{out}"


def run_example(line: str, dmlkit: Callable[..., Any]) -> str:
    result = dmlkit(*shlex.split(line)[1:]).ok()
    return (result.out + result.err).replace(f"{Path.cwd()}/", "")
