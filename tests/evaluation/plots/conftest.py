from pathlib import Path

import pytest

from dmlkit.plots.split import EmbeddedSplit, embed_split
from dmlkit.recipe.file import parse_recipe
from dmlkit.training.train import train
from tests.conftest import TINY_RECIPE


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 3 training, 3 validation and 6 test classes of 6 glyphs; nothing writes into it."""
    run = tmp_path_factory.mktemp("plots") / "run"
    train(parse_recipe(TINY_RECIPE.replace("epochs: 3", "epochs: 2, workers: 0"), "tiny.yaml"), run)
    return run


@pytest.fixture
def tested(tiny_run: Path) -> EmbeddedSplit:
    return embed_split(tiny_run, "test", device="cpu")


@pytest.fixture
def trained_on(tiny_run: Path) -> EmbeddedSplit:
    return embed_split(tiny_run, "train", device="cpu")
