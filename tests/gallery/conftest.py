"""A run on the ball, another one, and photos of some birds, for all tests of galleries."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import ON_THE_BALL
from tests.datasets import trees

BIRDS = ("crow", "dove", "finch", "gull")


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory, trained_once: Callable[..., Path]) -> Path:
    folder = tmp_path_factory.mktemp("place")
    trained_once(folder, ON_THE_BALL.replace("seed: 3", "seed: 4")).rename(folder / "other")
    trained_once(folder, ON_THE_BALL)
    trees.birds(folder / "photos", BIRDS, 3)
    return folder
