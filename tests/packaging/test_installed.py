"""The wheel in an environment of its own, without extras and away from this tree: the whole way works there."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import TINY_RECIPE, every_command

pytestmark = pytest.mark.heavy
SMALL = "--set training.epochs=1 --set dataset.images_per_class=6 --set dataset.classes=40"
DEVELOPMENT = ("pytest", "cvxpylayers", "ot", "timm", "onnx", "lancedb", "ray", "mkdocs", "hypothesis")

HELP = """
import sys
from dmlkit.cli.app import main

for words in sys.argv[1:]:
    sys.argv = ["dmlkit", *words.split(), "--help"]
    try:
        main()
    except SystemExit as end:
        print("==", end.code)
"""

EACH = """
import shlex, sys
from dmlkit.cli.app import main

for line in sys.argv[1:]:
    sys.argv = ["dmlkit", *shlex.split(line)]
    try:
        main()
    except SystemExit as end:
        assert not end.code, line
"""
"""Runs command lines in one process: each new one took 5 s to import torch."""


@pytest.fixture(scope="module")
def run(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., subprocess.CompletedProcess[str]]:
    empty = tmp_path_factory.mktemp("empty")
    unset = ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    environment["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))

    def run(program: str, *words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        command = [str(installed / program), *words]
        done = subprocess.run(command, cwd=empty, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == code, done.stderr
        return done

    return run


def test_it_is_the_wheel_that_runs_and_nothing_of_development_is_there(run, installed):
    code = f"print([name for name in {DEVELOPMENT!r} if find_spec(name)]); import dmlkit; print(dmlkit.__file__)"
    missing, place = run("python", "-c", f"from importlib.util import find_spec; {code}").stdout.splitlines()
    assert missing == "[]" and place.startswith(str(installed.parent))


def test_every_command_shows_its_help(run: Callable[..., subprocess.CompletedProcess[str]]):
    every = [words for words, _ in every_command()]
    lines = run("python", "-c", HELP, *every).stdout.splitlines()
    assert sum(line == "== 0" for line in lines) == len(every) == sum("--help" in line for line in lines)


def test_components_are_listed_from_the_classes_and_then_from_the_catalogue(run):
    first, second = (run("dmlkit", "list", "losses").stdout for _ in range(2))
    assert "proxy_anchor" in first and first == second


def test_a_study_runs_and_is_reported_and_a_run_is_evaluated_embedded_and_exported(run, tmp_path: Path):
    assert "glyphs/proxy_anchor" in run("dmlkit", "list", "recipes").stdout
    run("dmlkit", "copy", "grouplet/cub200", "birds.yaml")
    (tmp_path / "tiny.yaml").write_text(TINY_RECIPE.replace("epochs: 3", "epochs: 1"))
    study, folder = tmp_path / "study.yaml", tmp_path / "study"
    study.write_text("claim: A claim\nrecipe: tiny.yaml\nseeds: [0]\ngrid: {loss.margin: [0.1, 0.3]}\n")
    lines = (
        f"study {study} -o {folder} --dry-run",
        f"study {study} -o {folder} --device cpu",
        f"status {folder}",
        f"report {folder} -o {tmp_path / 'report.md'}",
        f"train glyphs/proxy_anchor -o runs/demo {SMALL}",
        "eval runs/demo",
        "embed runs/demo --split test",
        "export runs/demo/embeddings/test --format faiss",
    )
    printed = run("python", "-c", EACH, *lines).stdout
    assert "2 runs: 2 models" in printed and "2 of 2" in printed and (tmp_path / "report.md").exists()
    assert "map@r" in printed.partition("run folder")[2]


def test_what_an_extra_brings_is_asked_for_by_its_name(run: Callable[..., subprocess.CompletedProcess[str]]):
    words = ["train", "glyphs/grouplet", "-o", "runs/missing", "--set", "loss.solver={name: sinkhorn}"]
    assert "pip install 'dmlkit[transport]'" in run("dmlkit", *words, code=2).stderr
