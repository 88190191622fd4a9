import os

# One thread: the tests are small, and two processes that share cores slow each other ten-fold otherwise.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
collect_ignore = ["toy_plugin"]  # its members are for the tests that install it
TINY_RECIPE = """\
seed: 3
dataset: {name: glyphs, classes: 12, images_per_class: 6, size: 16, validation_fraction: 0.34}
transform: {name: plain, size: 16}
backbone: {name: small_cnn, width: 4}
embedding_dim: 8
loss: {name: proxy_anchor}
sampler: {name: random, batch_size: 8}
optimizer: {name: adamw, lr: 0.003, lr_multipliers: {loss: 10}}
training: {epochs: 3}
metrics: [{name: recall, k: [1, 2]}, {name: map_at_r}]
"""


@dataclass
class Result:
    code: int
    out: str
    err: str


@pytest.fixture
def dmlkit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Run the command line in this process, as the console script would."""

    def run(*arguments: object) -> Result:
        from dmlkit.cli.app import main

        monkeypatch.setattr(sys, "argv", ["dmlkit", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit_info:
            main()
        captured = capsys.readouterr()
        code = exit_info.value.code
        return Result(0 if code is None else int(code), captured.out, captured.err)

    return run


@pytest.fixture
def tiny_recipe(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY_RECIPE)
    return path
