"""Checkpoints that are written while training goes on."""

import sys
from collections import OrderedDict
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch

from dmlkit.distributed.stopping import TrainingStoppedError
from dmlkit.errors import UserError
from dmlkit.run_folder.checkpoint_file import CHECKPOINTS
from dmlkit.run_folder.folder import RunFolder
from dmlkit.training.checkpoint import CheckpointWriter, copy_to_cpu
from dmlkit.training.progress import Silent
from tests.conftest import Killed
from tests.training.test_train import assert_equal_weights, weights
from tests.training.test_tuning import Stopper, trained

OVERRIDES = ("training.ema=0.9", "training.epochs=4")


class Written:
    """What a run folder was given, once it may be written."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_write = Event()
        self.found: list[tuple[str, Any]] = []
        monkeypatch.setattr(RunFolder, "save_checkpoint", lambda _, name, state: self._save(name, state))

    def _save(self, name: str, state: dict[str, Any]) -> None:
        assert self.may_write.wait(60)
        if "fault" in state:
            raise UserError(state["fault"])
        self.found.append((name, state))


def test_what_was_given_is_written_whatever_changes_meanwhile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    written = Written(monkeypatch)
    weight = torch.zeros(3, requires_grad=True)
    state = {"model": OrderedDict(weight=weight), "optimizer": {"state": {0: {"step": torch.zeros(())}}}, "epoch": 1}
    with CheckpointWriter(RunFolder(tmp_path), in_background=True) as writer:
        writer.write("best", state)
        writer.write("last", state)
        with torch.no_grad():
            weight.add_(1)
        state["optimizer"]["state"][0]["step"].add_(1)
        state["epoch"] = 2
        assert written.found == []
        written.may_write.set()
        writer.wait()
        assert [name for name, _ in written.found] == ["best", "last"]
        for _, found in written.found:
            assert torch.equal(found["model"]["weight"], torch.zeros(3)) and found["epoch"] == 1
            assert found["optimizer"]["state"][0]["step"] == 0


def test_copies_are_equal_to_the_last_key():
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.rand(4, 2)).sum().backward()
    optimizer.step()
    model = module.state_dict()
    copied: Any = copy_to_cpu(model)
    assert type(copied) is type(model) and copied._metadata == model._metadata
    assert_equal_weights(copied, model)
    assert not any(copied[name].data_ptr() == model[name].data_ptr() for name in model)
    torch.testing.assert_close(copy_to_cpu(optimizer.state_dict()), optimizer.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("end", ["wait", "close"])
def test_a_write_that_fails_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, end: str):
    Written(monkeypatch).may_write.set()
    writer = CheckpointWriter(RunFolder(tmp_path), in_background=True)
    with pytest.raises(UserError, match="is the disk full"), writer:
        writer.write("last", {"fault": "is the disk full?"})
        if end == "wait":
            writer.wait()
            pytest.fail("it went on")


@pytest.fixture
def in_background(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU too."""
    train = sys.modules["dmlkit.training.train"]
    monkeypatch.setattr(train, "CheckpointWriter", lambda run, **_: CheckpointWriter(run, in_background=True))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("runs") / "whole", *OVERRIDES)


def leaves(value: Any, path: str = "") -> dict[str, Any]:
    """What a checkpoint holds, tensors as lists."""
    if isinstance(value, dict | list | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {name: leaf for key, part in items for name, leaf in leaves(part, f"{path}.{key}").items()}
    return {path: value.tolist() if isinstance(value, torch.Tensor) else value}


@pytest.mark.usefixtures("in_background")
@pytest.mark.parametrize("stopped", [None, (1, False), (1, True)], ids=["whole", "within an epoch", "after an epoch"])
def test_a_run_writes_the_same_files(whole: Path, tmp_path: Path, stopped: tuple[int, bool] | None):
    if stopped:
        with pytest.raises(TrainingStoppedError):
            trained(tmp_path / "run", *OVERRIDES, progress=Stopper(*stopped))
    run = trained(tmp_path / "run", *OVERRIDES, resume=stopped is not None)
    for name in CHECKPOINTS:
        found, expected = (leaves(RunFolder(path).load_checkpoint(name)) for path in (run, whole))
        assert {**found, ".seconds": 0} == {**expected, ".seconds": 0}
    before, after = RunFolder(whole).read_metrics(), RunFolder(run).read_metrics()
    assert [(row.epoch, row.loss, row.validation) for row in after] == [
        (row.epoch, row.loss, row.validation) for row in before
    ]


class KilledInEpoch(Silent):
    """Ends the run within an epoch, before the checkpoint of the epoch before is on the disk."""

    def __init__(self, epoch: int) -> None:
        self.epoch_to_end = epoch

    def step(self, *, epoch: int, **figures: Any) -> None:
        if epoch == self.epoch_to_end:
            raise Killed


@pytest.mark.usefixtures("in_background")
@pytest.mark.parametrize(("lost", "epoch"), [(("best", "last"), 1), (("last",), 3), (("best", "last"), 3)])
def test_a_run_whose_write_was_lost_goes_on_to_the_same_bits(whole, tmp_path, monkeypatch, lost, epoch):
    save = RunFolder.save_checkpoint

    def lose(run: RunFolder, name: str, state: dict[str, Any]) -> None:
        if not (name in lost and state["epoch"] == epoch):
            save(run, name, state)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(RunFolder, "save_checkpoint", lose)
        trained(tmp_path / "run", *OVERRIDES, progress=KilledInEpoch(epoch))
    run = trained(tmp_path / "run", *OVERRIDES, resume=True)
    for name in CHECKPOINTS:
        assert_equal_weights(weights(run, name), weights(whole, name))
