from collections.abc import Callable
from pathlib import Path

import pytest

from dmlkit.plots.split import EmbeddedSplit, embed_split


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory, trained_once: Callable[..., Path]) -> Path:
    """A run of 3 training, 3 validation and 6 test classes of 6 glyphs, with what these tests embed."""
    return trained_once(tmp_path_factory.mktemp("plots"))


@pytest.fixture
def tested(tiny_run: Path) -> EmbeddedSplit:
    return embed_split(tiny_run, "test", device="cpu")


@pytest.fixture
def trained_on(tiny_run: Path) -> EmbeddedSplit:
    return embed_split(tiny_run, "train", device="cpu")
