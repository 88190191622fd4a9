from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import ONE_EPOCH


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory: pytest.TempPathFactory, trained_once: Callable[..., Path]) -> Path:
    """A run of one epoch; copy it before anything is written there."""
    return trained_once(tmp_path_factory.mktemp("trained"))


@pytest.fixture(scope="session")
def patches_run(tmp_path_factory: pytest.TempPathFactory, trained_once: Callable[..., Path]) -> Path:
    """A run of images of 32 pixels, whose last map has 64 cells; that of `trained_run` has fewer."""
    return trained_once(tmp_path_factory.mktemp("local"), ONE_EPOCH.replace("size: 16", "size: 32"))
