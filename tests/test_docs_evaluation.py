"""docs/evaluation.md does what it says: its commands and Python run one after another beside a miniature run."""

import re
import shlex
from pathlib import Path

import pytest

from .conftest import TINY_RECIPE

TEXT = (Path(__file__).parent.parent / "docs" / "evaluation.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_every_block_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dmlkit):
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text(TINY_RECIPE.replace("classes: 12", "classes: 24"))  # folds of 3 classes
    for seed, name in enumerate(("demo", "other")):
        assert dmlkit("train", "recipe.yaml", "-o", f"runs/{name}", "--set", f"seed={seed}").code == 0
    blocks = re.findall(r"```(sh|python)\n(.*?)```", TEXT, re.DOTALL)
    assert [kind for kind, _ in blocks] == ["sh", "python", "sh", "sh", "sh"]
    for kind, body in blocks:
        if kind == "python":
            exec(compile(body, "docs/evaluation.md", "exec"), {})
            continue
        for line in body.splitlines():
            result = dmlkit(*shlex.split(line)[1:])
            assert result.code == 0, f"{line}\n{result.out}{result.err}"
    assert Path("classes.csv").exists() and "concatenated" in Path("runs/folds/results.md").read_text()
