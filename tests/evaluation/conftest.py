from pathlib import Path

import pytest
import yaml

from tests.conftest import TINY_RECIPE


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one epoch; copy it before anything is written there."""
    from dmlkit.recipe.file import read_recipe
    from dmlkit.training.train import train

    folder = tmp_path_factory.mktemp("trained")
    recipe = yaml.safe_load(TINY_RECIPE)
    recipe["training"]["epochs"] = 1
    (folder / "tiny.yaml").write_text(yaml.safe_dump(recipe))
    train(read_recipe(folder / "tiny.yaml"), folder / "run")
    return folder / "run"


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
