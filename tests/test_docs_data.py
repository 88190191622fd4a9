"""docs/data.md does what it says: its recipes, commands and Python run one after another on miniature photos."""

import re
import shlex
from pathlib import Path

import pytest

from tests.datasets import trees

TEXT = (Path(__file__).parent.parent / "docs" / "data.md").read_text(encoding="utf-8")
TINY = [
    "backbone={name: small_cnn, width: 4}",
    "transform={name: imagenet, size: 16, resize: 20}",
    "embedding_dim=8",
    "sampler.batch_size=4",
    "training.epochs=1",
    "training.workers=0",
]


@pytest.mark.slow
def test_every_block_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dmlkit, capsys):
    monkeypatch.chdir(tmp_path)
    rows = ["path,label"]
    for label, name in enumerate(("crow", "dove", "finch", "gull", "heron", "ibis", "jay", "kite")):
        for index in range(4):
            trees.photo(Path("photos") / name / f"{index}.jpg", 10 * label + index)
            rows.append(f"photos/{name}/{index}.jpg,{name}")
    trees.photo(Path("new") / "photo.jpg", 99)
    Path("catalogue.csv").write_text("\n".join(rows))
    blocks = re.findall(r"```(sh|yaml|python)\n(.*?)```", TEXT, re.DOTALL)
    assert [kind for kind, _ in blocks] == ["sh", "yaml", "sh", "sh", "python", "yaml", "sh", "sh"]
    for kind, body in blocks:
        if kind == "yaml":
            Path(re.match(r"# (\S+)\n", body)[1]).write_text(body)
        elif kind == "python":
            exec(compile(body, "docs/data.md", "exec"), {})
            assert "photos/" in capsys.readouterr().out
        else:
            for line in body.splitlines():
                _, *arguments = shlex.split(line)
                takes_recipe = any(argument.endswith(".yaml") for argument in arguments)
                tiny = [part for key in TINY for part in ("--set", key)] if takes_recipe else []
                result = dmlkit(*arguments, *tiny)
                assert result.code == 0, f"{line}\n{result.out}{result.err}"
    assert Path("embeddings/catalogue/index.faiss").exists()
    assert '"crow"' in Path("runs/catalogue/classes.json").read_text()
