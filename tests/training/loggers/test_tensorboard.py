"""Event files hold each epoch once, also where a kill came between showing and noting it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dmlkit.run_folder.folder import RunFolder
from dmlkit.training import progress as loggers
from tests.conftest import TINY_RECIPE

accumulator = pytest.importorskip(
    "tensorboard.backend.event_processing.event_accumulator", reason="the extra dmlkit[tensorboard] is not installed"
)


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events = accumulator.EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_event_files_hold_the_rows(tmp_path: Path, dmlkit: Callable[..., Any], monkeypatch: pytest.MonkeyPatch):
    recipe, folder = tmp_path / "logged.yaml", tmp_path / "run"
    recipe.write_text(TINY_RECIPE.replace("epochs: 3", "epochs: 3, workers: 0, loggers: [tensorboard]"))
    with monkeypatch.context() as patch:
        patch.setattr(loggers.LoggedRuns, "write", interrupted)
        stopped = dmlkit("train", recipe, "-o", folder)
    assert "fails" not in stopped.err
    assert not (folder / "loggers.json").exists()  # the first epoch is shown, and not noted
    assert dmlkit("train", recipe, "-o", folder, "--resume").code == 0
    rows, found = RunFolder(folder).read_metrics(), scalars(folder)
    for name in loggers.figures_of(rows[0]):
        expected = [(row.epoch, pytest.approx(loggers.figures_of(row)[name], rel=1e-6)) for row in rows]
        assert found[name] == expected
    assert [step for step, _ in found["test/map@r"]] == [3]


def interrupted(*_: object, **__: object) -> None:
    raise KeyboardInterrupt
