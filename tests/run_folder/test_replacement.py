"""A run is replaced whole, or not at all; and by one process at a time."""

import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

from dmlkit.distributed.stopping import StopRequest
from dmlkit.files.lock import sole_writer
from dmlkit.run_folder.folder import NEW, take_over
from tests.conftest import Killed

NEW_FILES = ("recipe.yaml", "environment.json", "classes.json", "metrics.jsonl", "checkpoints/best.pt")
OLD_FILES = (
    *(*NEW_FILES, "checkpoints/last.pt", "summary.json", "test_classes.json", "curves.png"),
    *("evaluations/test-best.json", "embeddings/test/embeddings.npy", "vectors/0123/model.json"),
)
FOREIGN = ("notes.txt", "mine/notes.txt")


def files(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.fixture
def run(trained_once: Callable[..., Path], tmp_path: Path) -> Path:
    """A run, next to its recipe."""
    return trained_once(tmp_path)


def write(folder: Path, names: tuple[str, ...], text: str):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def test_after_a_kill_anywhere_the_old_run_or_the_new_one_is_whole(tmp_path: Path, monkeypatch):
    """A kill before the first change, the second ... until there is none left."""
    was_killed, changes = True, 0
    while was_killed:
        run, left, was_killed = tmp_path / str(changes), [changes], False
        write(run, OLD_FILES, "old")
        write(run, FOREIGN, "theirs")
        write(run / NEW, NEW_FILES, "new")
        before = files(run)
        take_over(run)
        assert files(run) == before  # without a last checkpoint there is nothing to take over
        write(run / NEW, ("checkpoints/last.pt",), "new")
        with monkeypatch.context() as patch:
            for name in ("replace", "rename", "unlink", "rmdir", "mkdir"):
                patch.setattr(os, name, _until(left, getattr(os, name)))
            try:
                take_over(run)
            except Killed:
                was_killed, changes = True, changes + 1
                # the last checkpoint is the new one only where everything else is
                last = run / "checkpoints" / "last.pt"
                if last.exists() and last.read_text() == "new":
                    assert {files(run)[name] for name in NEW_FILES} == {b"new"}, changes
        take_over(run)
        expected = dict.fromkeys((*NEW_FILES, "checkpoints/last.pt"), b"new") | dict.fromkeys(FOREIGN, b"theirs")
        assert files(run) == expected, changes
        assert not (run / NEW).exists()  # an emptied folder of the old run may stay
    assert changes > len(OLD_FILES) + len(NEW_FILES)  # each file is removed, or moved


def _until(left: list[int], change: Callable[..., object]) -> Callable[..., object]:
    def perform(*arguments: object, **options: object) -> object:
        if left[0] == 0:
            raise Killed
        left[0] -= 1
        return change(*arguments, **options)

    return perform


def test_a_new_run_that_diverges_leaves_the_old_one_as_it_was(dmlkit, tiny_recipe: Path, run: Path):
    """D8: the good checkpoints were gone before the new run had made a step."""
    before = files(run)
    dmlkit("train", tiny_recipe, "-o", run, "--device", "cpu", "--overwrite", "--set", "optimizer.lr=1e30").refused(
        f"not finite; the previous run in {run} is unchanged. Lower"
    )
    assert files(run) == before and not list(run.rglob(".*"))


def test_what_a_killed_overwrite_left_is_no_part_of_a_resumed_run(dmlkit, run: Path):
    before = files(run)
    write(run / NEW, NEW_FILES, "new")
    (run / "summary.json").unlink()
    dmlkit("train", run.with_name("recipe.yaml"), "-o", run, "--device", "cpu", "--resume").ok()
    after = files(run)
    assert after.keys() == before.keys()
    assert after["checkpoints/last.pt"] == before["checkpoints/last.pt"]


def test_a_stopped_overwrite_is_continued_by_resume_in_its_place(dmlkit, run: Path, monkeypatch):
    monkeypatch.setattr(StopRequest, "is_known", lambda self, ranks: True)
    words = ("train", run.with_name("recipe.yaml"), "-o", run, "--device", "cpu")
    result = dmlkit(*words, "--overwrite")
    assert result.code == 130
    message = "stopped in epoch 1 after step 1; to resume, rerun the same command with --resume instead of --overwrite"
    assert " ".join(result.out.split()).endswith(message)
    monkeypatch.undo()
    assert dmlkit(*words, "--resume").code == 0


@pytest.mark.parametrize("name", ["assemble", "fit"])
def test_the_advice_after_ctrl_c_before_the_first_checkpoint_works(name: str, dmlkit, run: Path, tmp_path, monkeypatch):
    """It was to add --resume to --overwrite, which is refused."""

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    module, before = import_module("dmlkit.training.train"), files(run)
    words = ("train", run.with_name("recipe.yaml"), "--device", "cpu", "-o")
    with monkeypatch.context() as patch:
        patch.setattr(module, name, interrupted)
        stopped = dmlkit(*words, run, "--overwrite")
        of_new = dmlkit(*words, tmp_path / "new", "--overwrite")
    assert stopped.code == of_new.code == 130
    assert stopped.out.endswith("stopped; nothing was replaced: rerun the same command\n")
    assert files(run) == before
    assert dmlkit(*words, run, "--overwrite").code == 0
    is_started = "--resume instead of --overwrite" in of_new.out
    assert is_started == (name == "fit")
    assert dmlkit(*words, tmp_path / "new", "--resume" if is_started else "--overwrite").code == 0


@pytest.mark.parametrize("options", [(), ("--resume",), ("--overwrite",)])
def test_two_trainings_do_not_share_a_folder(options, dmlkit, tiny_recipe: Path, tmp_path: Path, impatient: None):
    """W3: both ended well, and the weights of one stood beside the recipe of the other."""
    run = tmp_path / "run"
    with sole_writer(run, what="a training"):
        result = dmlkit("train", tiny_recipe, "-o", run, "--device", "cpu", *options)
    assert result.code == 2
    assert result.err == (
        f"error: {run}: a training is running in this folder in another process; wait until it ends, and rerun the "
        "same command\n"
    )
    assert not run.exists() or not any(run.iterdir())
