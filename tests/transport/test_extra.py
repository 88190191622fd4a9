"""Solvers whose packages are an extra, where it is not installed."""

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest

from dmlkit.transport import base
from tests.conftest import TINY_RECIPE, Result


@pytest.fixture(autouse=True)
def without_extra(monkeypatch: pytest.MonkeyPatch):
    def find(name: str):
        return None if name in ("ot", "cvxpylayers") else importlib.util.find_spec(name)

    monkeypatch.setattr(base, "find_spec", find)


@pytest.mark.parametrize(("solver", "package"), [("sinkhorn", "POT"), ("emd", "POT"), ("cvxpy", "cvxpylayers")])
def test_a_solver_names_the_extra_before_training(
    solver: str, package: str, tmp_path: Path, dmlkit: Callable[..., Result]
):
    recipe = TINY_RECIPE.replace("{name: proxy_anchor}", f"{{name: grouplet, solver: {{name: {solver}}}}}")
    (tmp_path / "tiny.yaml").write_text(recipe)
    told = dmlkit("train", tmp_path / "tiny.yaml", "-o", tmp_path / "run")
    assert told.code == 2 and not (tmp_path / "run").exists()
    line = f"loss: {solver} needs {package}, which is not installed; install it with: pip install 'dmlkit[transport]'\n"
    assert told.err.endswith(line) and told.err.count("\n") == 1
