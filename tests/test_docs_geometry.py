"""docs/geometry.md does what it says: its commands and Python run one after another on miniature glyphs."""

import re
import shlex
from pathlib import Path

import pytest

from .conftest import TINY_RECIPE

TEXT = (Path(__file__).parent.parent / "docs" / "geometry.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_every_block_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dmlkit, capsys):
    monkeypatch.chdir(tmp_path)
    recipe = Path("recipes/glyphs/proxy_anchor.yaml")
    recipe.parent.mkdir(parents=True)
    recipe.write_text(TINY_RECIPE)
    assert dmlkit("train", recipe, "-o", "runs/demo").code == 0
    blocks = re.findall(r"```(sh|python)\n(.*?)```", TEXT, re.DOTALL)
    assert [kind for kind, _ in blocks] == ["sh", "sh", "sh", "python"]
    for kind, body in blocks:
        if kind == "python":
            exec(compile(body, "docs/geometry.md", "exec"), {})
            continue
        for line in body.splitlines():
            result = dmlkit(*shlex.split(line)[1:])
            assert result.code == 0, f"{line}\n{result.out}{result.err}"
    assert capsys.readouterr().out.split()[:2] == ["[[", "0"]  # an image finds itself first
    assert Path("runs/disk/plots/test-disk.png").exists() and Path("runs/demo/plots/test-tsne.png").exists()
