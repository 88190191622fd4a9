"""Loggers show what metrics.jsonl holds, each epoch once, and cost a run nothing when they fail."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from dmlkit.recipe.file import read_recipe
from dmlkit.recipe.schema import LoggerName
from dmlkit.run_folder.documents import EpochRow, Metrics
from dmlkit.run_folder.folder import RunFolder
from dmlkit.training import progress as loggers
from tests.conftest import TINY_RECIPE

RECIPE = TINY_RECIPE.replace("epochs: 3", "epochs: 3, workers: 0, loggers: [tensorboard]")
Dmlkit = Callable[..., Any]


class Kept:
    """Keeps what it is shown; fails as often as it is asked to."""

    shown: list[tuple[int, Metrics]] = []  # noqa: RUF012 - of all sessions
    faults: list[BaseException] = []  # noqa: RUF012
    ended: list[bool] = []  # noqa: RUF012

    def __init__(self, folder: Path, recipe: dict[str, Any], known_as: str | None, epochs: int) -> None:
        if self.faults:
            raise self.faults.pop()
        self.known_as = known_as or f"{folder.name} {len(self.shown)}"

    def log(self, figures: Metrics, epoch: int) -> None:
        self.shown.append((epoch, figures))
        if self.faults:
            raise self.faults.pop()

    def close(self, *, finished: bool) -> None:
        self.ended.append(finished)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> type[Kept]:
    monkeypatch.setitem(loggers.CLASSES, "tensorboard", Kept)
    for name in ("shown", "faults", "ended"):
        monkeypatch.setattr(Kept, name, [])
    return Kept


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "logged.yaml"
    path.write_text(RECIPE)
    return path


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    state = RunFolder(folder).load_checkpoint("last")
    return {**state["model"], "random": state["random"]["cpu"]}


def test_a_logger_is_shown_every_epoch_and_then_the_test_figures(recipe: Path, kept: type[Kept], dmlkit: Dmlkit):
    folder = recipe.parent / "run"
    assert dmlkit("train", recipe, "-o", folder).code == 0
    rows = RunFolder(folder).read_metrics()
    assert kept.shown[:-1] == [(row.epoch, loggers.figures_of(row)) for row in rows]
    summary = json.loads((folder / "summary.json").read_text())
    assert kept.shown[-1] == (3, {f"test/{name}": value for name, value in summary["best"]["test"].items()})
    assert kept.ended == [True]
    assert json.loads((folder / "loggers.json").read_text())["loggers"] == {
        "tensorboard": {"known_as": "run 0", "epochs": 3, "tested": True}
    }


def test_weights_are_the_same_to_the_bit_with_and_without(recipe: Path, dmlkit: Dmlkit):
    pytest.importorskip("tensorboard", reason="the extra dmlkit[tensorboard] is not installed")
    for folder, options in (("with", []), ("without", ["--set", "training.loggers=[]"])):
        assert dmlkit("train", recipe, "-o", recipe.parent / folder, *options).code == 0
    ours, theirs = weights_of(recipe.parent / "with"), weights_of(recipe.parent / "without")
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())


def test_a_logger_that_fails_is_reported_once_and_catches_up(recipe: Path, kept: type[Kept], dmlkit: Dmlkit):
    folder = recipe.parent / "run"
    kept.faults.append(ConnectionError("https://me:secret@logs.example is down\nand more"))
    result = dmlkit("train", recipe, "-o", folder)
    warnings = [line for line in result.err.splitlines() if "tensorboard" in line]
    assert result.code == 0 and warnings == [
        "warning: training.loggers: tensorboard fails (https://logs.example is down); the run continues without it "
        "and keeps all its metrics"
    ]
    assert kept.shown == [] and len(RunFolder(folder).read_metrics()) == 3
    assert "secret" not in "".join(path.read_text("latin-1") for path in folder.rglob("*") if path.is_file())
    assert dmlkit("train", recipe, "-o", folder, "--resume").code == 0
    assert [epoch for epoch, _ in kept.shown] == [1, 2, 3, 3]


@pytest.mark.parametrize("method", ["__init__", "log", "close"])
@pytest.mark.parametrize("fault", [SystemExit(3), ValueError("\n\nand more")], ids=repr)
def test_a_logger_that_fails_at_any_call_costs_the_run_nothing(method, fault, recipe, kept, monkeypatch):
    run = RunFolder(recipe.parent / "run")
    run.create(read_recipe(recipe), overwrite=False)
    row = EpochRow(epoch=1, loss=1.0, lr=0.1, images_per_second=1.0, waiting=0.0, seconds=1.0, validation=None)
    run.append_metrics(row)

    def fail(*_: object, **__: object) -> None:
        raise fault

    for is_whole in (False, True):
        with monkeypatch.context() as patch, warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            if not is_whole:
                patch.setattr(kept, method, fail)
            session = loggers.MirroredProgress(loggers.Silent(), read_recipe(recipe), run)
            session.epoch(row)
            session.close()
        messages = [str(warning.message) for warning in warned if "tensorboard fails" in str(warning.message)]
        assert len(messages) == (not is_whole) and not any("\n" in line for line in messages)
    assert {epoch for epoch, _ in kept.shown} == {1} and run.read_metrics() == [row]


def test_a_resumed_run_goes_on_under_its_name_with_each_epoch_once(recipe, kept, dmlkit, monkeypatch):
    folder = recipe.parent / "run"
    show, calls = loggers.MirroredProgress.epoch, []

    def killed(self: Any, row: Any) -> None:
        if row.epoch == 2:
            raise KeyboardInterrupt  # after the checkpoint, before the loggers
        show(self, row)
        calls.append(row.epoch)

    with monkeypatch.context() as patch:
        patch.setattr(loggers.MirroredProgress, "epoch", killed)
        dmlkit("train", recipe, "-o", folder)
    assert [epoch for epoch, _ in kept.shown] == [1] and kept.ended == [False]
    assert dmlkit("train", recipe, "-o", folder, "--resume").code == 0
    assert [epoch for epoch, _ in kept.shown] == [1, 2, 3, 3]
    assert kept.ended == [False, True]
    assert json.loads((folder / "loggers.json").read_text())["loggers"]["tensorboard"]["known_as"] == "run 0"


def test_a_session_without_the_logger_that_trained_further_is_caught_up_with_its_test_figures(recipe, kept, dmlkit):
    recipe.write_text(RECIPE.replace("{name: cosine", "{name: constant"))
    folder, more = recipe.parent / "run", ("--resume", "--set", "training.epochs=4")
    dmlkit("train", recipe, "-o", folder).ok()
    dmlkit("train", recipe, "-o", folder, *more, "--set", "training.loggers=[]").ok()
    dmlkit("train", recipe, "-o", folder, *more).ok()
    test = json.loads((folder / "summary.json").read_text())["best"]["test"]
    assert [epoch for epoch, _ in kept.shown] == [1, 2, 3, 3, 4, 4]
    assert kept.shown[-1] == (4, {f"test/{name}": value for name, value in test.items()})


def test_a_damaged_record_costs_the_logger_alone(recipe: Path, kept: type[Kept], dmlkit: Dmlkit):
    folder = recipe.parent / "run"
    assert dmlkit("train", recipe, "-o", folder, "--set", "training.epochs=1").code == 0
    (folder / "loggers.json").write_text("{")
    result = dmlkit("train", recipe, "-o", folder, "--resume", "--set", "training.epochs=1")
    assert result.code == 0 and result.err.count("loggers.json") == 1


def test_overwriting_a_run_begins_a_new_one_in_the_logger_named_like_the_folder(recipe, kept, dmlkit, monkeypatch):
    folder = recipe.parent / "run"
    assert dmlkit("train", recipe, "-o", folder).code == 0
    monkeypatch.chdir(folder)
    assert dmlkit("train", recipe, "-o", ".", "--overwrite").code == 0
    assert [epoch for epoch, _ in kept.shown] == [1, 2, 3, 3] * 2
    assert json.loads((folder / "loggers.json").read_text())["loggers"]["tensorboard"]["known_as"] == "run 4"


@pytest.mark.parametrize(("name", "dry"), [("mlflow", ("--dry-run",)), ("wandb", ())])
def test_an_extra_that_is_missing_is_named(recipe, dmlkit, monkeypatch, name: str, dry: tuple[str, ...]):
    monkeypatch.setattr(loggers, "find_spec", {}.get)
    text = f"training.loggers=[{name}]"
    result = dmlkit("train", recipe, "-o", recipe.parent / "run", "--set", text, *dry).refused()
    assert result.err.strip() == (
        f"error: --set {text}: training.loggers: {name} is not installed; install it with: pip install 'dmlkit[{name}]'"
    )
    assert not (recipe.parent / "run").exists()


def test_every_name_of_the_recipe_has_a_logger():
    assert set(loggers.CLASSES) == set(get_args(LoggerName))
