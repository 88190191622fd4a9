"""Checkpoints that are damaged, of another run or of another kind get one line, and never make a figure."""

import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.main import get_command

from dmlkit.cli.app import app
from dmlkit.errors import UserError
from dmlkit.run_folder.checkpoint_file import write_checkpoint
from dmlkit.run_folder.folder import RunFolder
from tests.conftest import TINY_RECIPE

State = dict[str, Any]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of other seeds and one of another manifold."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "r.yaml").write_text(TINY_RECIPE)
    sets = {"a": "seed=3", "b": "seed=4", "c": "manifold={name: euclidean}"}
    for name, change in sets.items():
        words = ["--set", "training.epochs=1", "--set", "training.workers=0", "--set", change, "--device", "cpu"]
        words = ["train", str(folder / "r.yaml"), "-o", str(folder / name), *words]
        get_command(app).main(words, standalone_mode=False)
    return folder


@pytest.fixture
def run(runs: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(runs / "a", tmp_path / "a"))


def error_of(dmlkit, *words: object) -> str:
    return dmlkit(*words, "--device", "cpu").refused().err.removeprefix("error: ")


def resume(runs: Path, run: Path) -> list[object]:
    sets = ["--set", "training.epochs=1", "--set", "training.workers=0", "--set", "seed=3"]
    return ["train", runs / "r.yaml", "-o", run, "--resume", *sets]


def change(path: Path, edit: Callable[[State], State]) -> None:
    torch.save(edit(torch.load(path, weights_only=True)), path)


@pytest.mark.parametrize("name", ["best", "last"])
def test_inverted_bytes_are_noticed_w10(dmlkit, run: Path, name: str):
    path = run / "checkpoints" / f"{name}.pt"
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 64] = bytes(255 - byte for byte in content[middle : middle + 64])
    path.write_bytes(content)
    torch.load(path, weights_only=True)  # takes no notice
    assert error_of(dmlkit, "eval", run, "--checkpoint", name).startswith(f"{path}: cannot read this checkpoint")


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
        (lambda state: {key: value for key, value in state.items() if key != "epoch"}, "this checkpoint lacks epoch"),
        (lambda state: {**state, "epoch": "one"}, "this checkpoint lacks epoch"),
        (lambda state: {**state, "model": [1]}, "this checkpoint lacks model"),
        (lambda state: {**state, "model": {**state["model"], "foo": torch.ones(1)}}, 'Unexpected key(s) in state_dict'),
        (
            lambda state: {**state, "model": {name: value[:1] for name, value in state["model"].items() if value.ndim}},
            "these weights do not fit the run's recipe",
        ),
    ],
    ids=["no model", "no epoch", "epoch of text", "model of a list", "extra tensor", "short tensors"],
)  # fmt: skip
def test_what_is_no_checkpoint_of_the_run_is_told_t5(dmlkit, run: Path, edit, expected: str):
    path = run / "checkpoints" / "best.pt"
    change(path, edit)
    line = error_of(dmlkit, "eval", run)
    assert line.startswith(f"{path}: ") and expected in line


@pytest.mark.parametrize(
    ("other", "name", "expected"),
    [
        ("b/checkpoints/best.pt", "best", "this is a checkpoint of another run (seed: was 4, now 3)"),
        ("c/checkpoints/best.pt", "best", "this is a checkpoint of another run (manifold.name: was euclidean"),
        ("b/checkpoints/last.pt", "last", "this is a checkpoint of another run (seed: was 4, now 3)"),
        ("a/checkpoints/best.pt", "last", "this checkpoint lacks step, loss_sums, seconds, best, skipped, pretrained"),
    ],
)
def test_a_checkpoint_in_the_place_of_another_is_told_t5(dmlkit, runs: Path, run: Path, other, name, expected):
    path = run / "checkpoints" / f"{name}.pt"
    shutil.copy(runs / other, path)
    command = ["eval", run] if name == "best" else resume(runs, run)
    assert error_of(dmlkit, *command).startswith(f"{path}: {expected}")


@pytest.mark.parametrize(
    ("key", "value"), [("random", {"cpu": torch.ones(3)}), ("optimizer", {"state": {}, "param_groups": []})]
)
def test_progress_that_does_not_fit_is_told_t5(dmlkit, runs: Path, run: Path, key: str, value: State):
    path = run / "checkpoints" / "last.pt"
    change(path, lambda state: {**state, key: value})
    assert error_of(dmlkit, *resume(runs, run)).startswith(f"{path}: does not fit this run")


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda path: path.unlink(), "does not have one row for each of the 1 finished epochs"),
        (lambda path: path.write_bytes(b""), "does not have one row for each of the 1 finished epochs"),
        (lambda path: path.write_bytes(b"\xc6\xff\n\xc6\n"), "metrics.jsonl:1: cannot read this row"),
        (
            lambda path: path.write_text('{"loss": 1}\n{"loss": 1}\n'),
            "metrics.jsonl:1: expected a row of metrics.jsonl",
        ),
        (lambda path: (path.unlink(), path.mkdir()), "Is a directory"),
    ],
    ids=["missing", "empty", "binary", "without epoch", "a folder"],
)
def test_metrics_that_cannot_be_read_stop_a_resume_t5(dmlkit, runs: Path, run: Path, damage, expected: str):
    damage(run / "metrics.jsonl")
    line = error_of(dmlkit, *resume(runs, run))
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
