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
