"""docs/embedding.md does what it says: its commands and Python run beside a miniature run."""

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from typer.main import get_command

from dmlkit.cli.app import app
from tests.datasets import trees

from .conftest import TINY_RECIPE

TEXT = (Path(__file__).parent.parent / "docs" / "embedding.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_every_block_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dmlkit):
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text(TINY_RECIPE.replace("epochs: 3", "epochs: 1, workers: 0"))
    assert dmlkit("train", "recipe.yaml", "-o", "runs/demo").code == 0
    for index in range(3):
        trees.photo(Path("photos") / f"{index}.jpg", index)
    blocks = re.findall(r"```(sh|python)\n(.*?)```", TEXT, re.DOTALL)
    assert [kind for kind, _ in blocks] == ["sh", "python"]
    assert dmlkit(*shlex.split(blocks[0][1])[1:]).code == 0
    scope: dict[str, np.ndarray] = {}
    exec(compile(blocks[1][1], "docs/embedding.md", "exec"), scope)
    assert scope["points"].shape == (3, 8)


def test_commands_of_engines_parse():
    commands = re.findall(r"^    .*dmlkit embed (.*)$", TEXT, re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        get_command(app).commands["embed"].make_context("embed", shlex.split(command))  # pyright: ignore
