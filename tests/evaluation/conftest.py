from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import TINY_RECIPE


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory: pytest.TempPathFactory, trained_once: Callable[..., Path]) -> Path:
    """A run of one epoch; copy it before anything is written there."""
    return trained_once(tmp_path_factory.mktemp("trained"))


@pytest.fixture(scope="session")
def patches_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of images of 32 pixels, whose last map has 64 cells, next to one of 16 pixels, ``small``."""
    from dmlkit.training.train import train

    folder = tmp_path_factory.mktemp("local")
    for name, side in (("run", 32), ("small", 16)):
        recipe = TINY_RECIPE.replace("size: 16", f"size: {side}").replace("epochs: 3", "epochs: 1, workers: 0")
        (folder / "recipe.yaml").write_text(recipe)
        train(folder / "recipe.yaml", folder / name, device="cpu")
    return folder / "run"
