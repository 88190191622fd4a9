"""A run on the ball and photos of some birds, for all tests of galleries."""

from pathlib import Path

import pytest

from tests.conftest import TINY_RECIPE
from tests.datasets import trees

BIRDS = ("crow", "dove", "finch", "gull")


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from dmlkit.training.train import train

    folder = tmp_path_factory.mktemp("place")
    recipe = TINY_RECIPE.replace("epochs: 3", "epochs: 1, workers: 0").replace("embedding_dim: 8", "embedding_dim: 4")
    (folder / "recipe.yaml").write_text(recipe + "manifold: {name: poincare}\n")
    train(folder / "recipe.yaml", folder / "run", device="cpu")
    train(folder / "recipe.yaml", folder / "other", device="cpu", overrides=["seed=4"])
    for label, name in enumerate(BIRDS):
        for index in range(3):
            trees.photo(folder / "photos" / name / f"{index}.jpg", 10 * label + index, (40, 30))
    return folder
