"""Checkpoints that are damaged, of another run or of another kind get one line, and never make a figure."""

import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dmlkit.errors import UserError
from dmlkit.run_folder.checkpoint_file import write_checkpoint
from dmlkit.run_folder.folder import RunFolder
from tests.conftest import ONE_EPOCH

State = dict[str, Any]


@pytest.fixture
def run(trained_once: Callable[..., Path], tmp_path: Path) -> Path:
    """A run, next to its recipe."""
    return trained_once(tmp_path)


def error_of(dmlkit, *words: object) -> str:
    return dmlkit(*words, "--device", "cpu").refused().err.removeprefix("error: ")


def resume(run: Path) -> list[object]:
    return ["train", run.with_name("recipe.yaml"), "-o", run, "--resume"]


def change(path: Path, edit: Callable[[State], State]) -> None:
    torch.save(edit(torch.load(path, weights_only=True)), path)


def test_inverted_bytes_are_noticed_w10(dmlkit, run: Path):
    path = run / "checkpoints" / "best.pt"
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 64] = bytes(255 - byte for byte in content[middle : middle + 64])
    path.write_bytes(content)
    torch.load(path, weights_only=True)  # takes no notice
    assert error_of(dmlkit, "eval", run).startswith(f"{path}: cannot read this checkpoint")


def test_members_that_would_be_inflated_are_not_read(dmlkit, run: Path):
    path = run / "checkpoints" / "best.pt"
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    assert "cannot read this checkpoint" in error_of(dmlkit, "eval", run)


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (lambda state: {key: value for key, value in state.items() if key != "model"}, "this checkpoint lacks model"),
        (lambda state: {**state, "epoch": "one"}, "this checkpoint lacks epoch"),
        (lambda state: {**state, "model": {**state["model"], "foo": torch.ones(1)}}, 'Unexpected key(s) in state_dict'),
        (
            lambda state: {**state, "model": {name: value[:1] for name, value in state["model"].items() if value.ndim}},
            "these weights do not fit the run's recipe",
        ),
    ],
    ids=["no model", "epoch of text", "extra tensor", "short tensors"],
)  # fmt: skip
def test_what_is_no_checkpoint_of_the_run_is_told_t5(dmlkit, run: Path, edit, expected: str):
    path = run / "checkpoints" / "best.pt"
    change(path, edit)
    line = error_of(dmlkit, "eval", run)
    assert line.startswith(f"{path}: ") and expected in line


SEED_4, FLAT = ONE_EPOCH.replace("seed: 3", "seed: 4"), ONE_EPOCH + "manifold: {name: euclidean}\n"


@pytest.mark.parametrize(
    ("recipe", "other", "name", "expected"),
    [
        (SEED_4, "best", "best", "this is a checkpoint of another run (seed: was 4, now 3)"),
        (FLAT, "best", "best", "this is a checkpoint of another run (manifold.name: was euclidean"),
        (SEED_4, "last", "last", "this is a checkpoint of another run (seed: was 4, now 3)"),
        (ONE_EPOCH, "best", "last", "this checkpoint lacks step, loss_sums, seconds, best, skipped, pretrained"),
    ],
    ids=["best", "flat", "last", "best as last"],
)
def test_a_checkpoint_in_the_place_of_another_is_told_t5(dmlkit, trained_once, run, recipe, other, name, expected):
    path = run / "checkpoints" / f"{name}.pt"
    shutil.copy(trained_once(run.with_name("other"), recipe) / "checkpoints" / f"{other}.pt", path)
    command = ["eval", run] if name == "best" else resume(run)
    assert error_of(dmlkit, *command).startswith(f"{path}: {expected}")


@pytest.mark.parametrize(
    ("key", "value"), [("random", {"cpu": torch.ones(3)}), ("optimizer", {"state": {}, "param_groups": []})]
)
def test_progress_that_does_not_fit_is_told_t5(dmlkit, run: Path, key: str, value: State):
    path = run / "checkpoints" / "last.pt"
    change(path, lambda state: {**state, key: value})
    assert error_of(dmlkit, *resume(run)).startswith(f"{path}: does not fit this run")


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda path: path.unlink(), "does not have one row for each of the 1 finished epochs"),
        (lambda path: path.write_bytes(b"\xc6\xff\n\xc6\n"), "metrics.jsonl:1: cannot read this row"),
        (
            lambda path: path.write_text('{"loss": 1}\n{"loss": 1}\n'),
            "metrics.jsonl:1: expected a row of metrics.jsonl",
        ),
        (lambda path: (path.unlink(), path.mkdir()), "Is a directory"),
    ],
    ids=["missing", "binary", "without epoch", "a folder"],
)
def test_metrics_that_cannot_be_read_stop_a_resume_t5(dmlkit, run: Path, damage, expected: str):
    damage(run / "metrics.jsonl")
    line = error_of(dmlkit, *resume(run))
    assert line.startswith(str(run / "metrics.jsonl")) and expected in line


def test_a_checkpoint_that_may_not_be_read_is_not_called_damaged_u1(dmlkit, run: Path, monkeypatch):
    def refuse(path: Path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(zipfile, "ZipFile", refuse)  # root may read everything
    assert error_of(dmlkit, "eval", run) == f"{run / 'checkpoints' / 'best.pt'}: Permission denied\n"


def test_a_full_disk_is_told_with_the_path_t4(tmp_path: Path, monkeypatch):
    def full(*_: object) -> None:
        raise RuntimeError("[enforce fail at inline_container.cc:671] . unexpected pos 461312 vs 461208\nmore")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(UserError) as error:
        write_checkpoint(tmp_path / "last.pt", {})
    assert str(error.value).startswith(f"{tmp_path / 'last.pt'}: cannot write this checkpoint")
    assert "\n" not in str(error.value) and not list(tmp_path.iterdir())


def test_a_dataset_that_has_moved_keeps_its_weights(run: Path):
    text = (run / "recipe.yaml").read_text()
    (run / "recipe.yaml").write_text(text.replace("images_per_class: 6", "images_per_class: 7"))
    assert RunFolder(run).load_checkpoint("best")["epoch"] == 1
