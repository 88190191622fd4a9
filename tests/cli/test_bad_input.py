"""A user's mistakes: one clear line, exit code 2, no traceback, nothing lost."""

import gc
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image

from dmlkit.cli.app import main
from dmlkit.errors import UserError
from tests.conftest import TINY_RECIPE, Cli
from tests.training.test_train import assert_same_weights


@pytest.fixture
def image_folder(tmp_path: Path) -> Path:
    for label in range(4):
        for index in range(4):
            path = tmp_path / "images" / f"class{label}" / f"{index}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.effect_noise((20, 20), 40).convert("RGB").save(path)
    return tmp_path / "images"


def folder_options(root: Path, *more: str) -> list[str]:
    """A folder of images, read without loader processes: those of a failed command may end during the next one."""
    overrides = [f"dataset={{name: folder, root: '{root}', validation_fraction: 0}}", "sampler.batch_size=4"]
    overrides += ["training.workers=0", *more]
    return [part for override in overrides for part in ("--set", override)]


def test_faults_of_a_recipe(dmlkit: Cli, tmp_path: Path):
    recipe = tmp_path / "bad.yaml"
    recipe.write_text("dataset: {name: glyphs}\nloss:\n  name: proxy_anchr\ntraining:\n  epochs: two\n  lr: 3\n")
    result = dmlkit("train", recipe)
    lines = result.err.splitlines()
    assert result.code == 2 and all(line.startswith("error: ") for line in lines)
    assert "bad.yaml:3: loss.name: unknown loss 'proxy_anchr'; did you mean 'proxy_anchor'?" in lines[0]
    assert "bad.yaml:5: training.epochs: got 'two', expected a valid integer" in lines[1]
    assert "bad.yaml:6: training.lr: unknown key" in lines[2]


def test_broken_images_stop_or_are_skipped_and_counted(dmlkit, tiny_recipe: Path, tmp_path: Path, image_folder: Path):
    classes = sorted(path.name for path in image_folder.iterdir())
    broken, unseen = image_folder / classes[0] / "2.png", image_folder / classes[-1] / "2.png"  # trains | tests
    for path in (broken, unseen):
        path.write_bytes(path.read_bytes()[:60])
    run = tmp_path / "run"
    dmlkit("train", tiny_recipe, "-o", run, *folder_options(image_folder)).refused(f"{broken}: cannot read this image")
    options = folder_options(image_folder, "dataset.on_bad_image=skip", "training.epochs=1")
    result = dmlkit("train", tiny_recipe, "-o", run, "--overwrite", *options).ok()
    skipped = json.loads((run / "summary.json").read_text())["skipped_images"]
    assert len(skipped) == 2 and str(broken) in skipped[0] and str(unseen) in skipped[1]
    assert "2 images could not be read" in result.out


def test_a_run_that_a_broken_image_stops_at_its_end_resumes_without_it(
    dmlkit: Cli, tiny_recipe: Path, tmp_path: Path, image_folder: Path
):
    """As the message says; the run is then that which has skipped the image from the start."""
    broken = image_folder / max(path.name for path in image_folder.iterdir()) / "2.png"  # it tests
    broken.write_bytes(broken.read_bytes()[:60])
    options = folder_options(image_folder, "training.epochs=1")
    skips = (*options, "--set", "dataset.on_bad_image=skip")
    stopped = dmlkit("train", tiny_recipe, "-o", tmp_path / "run", *options)
    stopped.refused(f"{broken}: cannot read this image", "or skip such images with dataset.on_bad_image=skip")
    dmlkit("train", tiny_recipe, "-o", tmp_path / "run", "--resume", *skips).ok()
    dmlkit("train", tiny_recipe, "-o", tmp_path / "whole", *skips).ok()
    assert_same_weights(tmp_path / "run", tmp_path / "whole")
    summaries = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("run", "whole")]
    assert summaries[0]["last"] == summaries[1]["last"]
    assert summaries[0]["skipped_images"] == summaries[1]["skipped_images"] and len(summaries[0]["skipped_images"]) == 1


def test_workers_name_the_broken_image_too(dmlkit: Cli, tiny_recipe: Path, tmp_path: Path, image_folder: Path):
    (image_folder / "class0" / "2.png").write_bytes(b"")
    options = folder_options(image_folder, "training.workers=1")
    dmlkit("train", tiny_recipe, "-o", tmp_path / "run", *options).refused("2.png: cannot read this image")
    gc.collect()  # what the loader's process still writes is written here


def test_a_folder_with_a_run_is_kept(dmlkit: Cli, trained_once: Callable[..., Path], tmp_path: Path):
    run, recipe = trained_once(tmp_path), tmp_path / "recipe.yaml"
    before = (run / "checkpoints" / "last.pt").read_bytes()
    dmlkit("train", recipe, "-o", run).refused("already holds a run", "--resume", "--overwrite")
    changed = dmlkit("train", recipe, "-o", run, "--resume", "--set", "loss.margin=0.3")
    changed.refused("the recipe has changed", "loss.margin: was 0.1, now 0.3")
    for dry in ((), ("--dry-run",)):
        dmlkit("train", recipe, "-o", run, "--resume", "--overwrite", *dry).refused("use only one of them")
    assert (run / "checkpoints" / "last.pt").read_bytes() == before
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("years of work")
    for options in ((), ("--overwrite",)):
        dmlkit("train", recipe, "-o", tmp_path / "other", *options).refused("is not a dmlkit run")
    assert (tmp_path / "other" / "thesis.txt").exists()


def test_a_loss_that_diverges_keeps_the_last_good_checkpoint(dmlkit: Cli, tmp_path: Path):
    recipe, run = tmp_path / "tiny.yaml", tmp_path / "run"
    recipe.write_text(TINY_RECIPE.replace("lr_multipliers: {loss: 10}", "weight_decay: 0.0"))
    result = dmlkit("train", recipe, "-o", run, "--set", "optimizer.lr=3e36", "--device", "cpu")
    result.refused("epoch 1, step 2: embeddings are not finite", "no checkpoint was written yet")

    # one step an epoch: the last update of an epoch destroys the weights just before they would be saved
    recipe.write_text(TINY_RECIPE.replace("batch_size: 8", "batch_size: 18"))
    assert dmlkit("train", recipe, "-o", run, "--overwrite", "--device", "cpu").code == 0
    (run / "checkpoints" / "best.pt").rename(tmp_path / "best.pt")
    assert "best.pt: missing, although epoch 1 was the best" in dmlkit("eval", run).ok().err
    (tmp_path / "best.pt").rename(run / "checkpoints" / "best.pt")
    path = run / "checkpoints" / "last.pt"
    state = torch.load(path, weights_only=True)
    state["optimizer"]["state"][0]["exp_avg"].fill_(float("inf"))
    torch.save({**state, "epoch": 2}, path)
    before = path.read_bytes()
    result = dmlkit("train", recipe, "-o", run, "--resume", "--device", "cpu")
    result.refused("epoch 3, step 1: weights are not finite", "the last good checkpoint is", "Lower optimizer.lr")
    assert path.read_bytes() == before

    # the last update of the first epoch leaves weights that are finite, and too large for the embeddings of validation
    result = dmlkit("train", recipe, "-o", tmp_path / "new", "--set", "optimizer.lr=1e30", "--device", "cpu")
    result.refused("its embedding has nan or inf; the training diverged", "lower optimizer.lr")


def test_devices_that_are_not_there(dmlkit: Cli, tiny_recipe: Path, tmp_path: Path):
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    dmlkit("train", tiny_recipe, "-o", tmp_path / "run", "--device", "cuda").refused("no CUDA device")
    assert not (tmp_path / "run").exists()


def test_checkpoints_that_cannot_be_read(dmlkit: Cli, trained_once: Callable[..., Path], tmp_path: Path):
    run = trained_once(tmp_path)
    path = run / "checkpoints" / "last.pt"
    torch.save({**torch.load(path, weights_only=True), "format": 99, "dmlkit": "9.0"}, path)
    dmlkit("eval", run, "--checkpoint", "last").refused("a checkpoint of format 99 (dmlkit 9.0)", "reads format 1")
    torch.save({"format": 1, "model": Path("x")}, path)  # needs pickle, which could run code
    dmlkit("eval", run, "--checkpoint", "last").refused("cannot read this checkpoint")
    path.unlink()
    dmlkit("eval", run, "--checkpoint", "last").refused("no such checkpoint")


def test_a_value_that_is_none_of_the_choices_is_told_without_the_words_of_pydantic(dmlkit: Cli, tmp_path: Path):
    result = dmlkit("compare", tmp_path, tmp_path, "--by", "images")
    said = " ".join(result.err.replace("│", " ").split())
    assert result.code == 2 and "Invalid value for '--by': 'images' is not one of 'classes', 'queries'." in said


def test_embed_leaves_nothing_of_an_image_that_it_cannot_read(
    dmlkit: Cli, trained_once, tmp_path: Path, image_folder: Path
):
    run = trained_once(tmp_path)
    dmlkit("embed", run).refused("expected either IMAGES or --split")
    (broken := image_folder / "class0" / "2.png").write_bytes(b"broken")
    dmlkit("embed", run, image_folder, "-o", tmp_path / "out").refused(f"{broken}: cannot read this image")
    assert not list((tmp_path / "out").glob("*"))


def test_a_current_folder_that_was_deleted_is_told_before_torch_ends_the_process(dmlkit: Cli, monkeypatch, tmp_path):
    (gone := tmp_path / "gone").mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    dmlkit("check", "glyphs/proxy_anchor").refused("the current folder was deleted")


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr("sys.argv", ["dmlkit", "check", str(tmp_path / "none.yaml"), "--debug"])
    with pytest.raises(UserError):
        main()


@pytest.fixture
def check_stopped(dmlkit: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Check that a command that does some work ends in a line."""

    def check(work: Callable[..., object]) -> None:
        (tmp_path / "study.json").touch()
        monkeypatch.setattr("dmlkit.study.status.status_of", work)
        interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
        result = dmlkit("status", tmp_path)
        signal.signal(signal.SIGINT, interrupt)
        assert (result.code, result.out, result.err) == (130, "", "stopped; run the same command again\n")

    return check


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_end_any_command_in_a_line(number: int, check_stopped: Callable[..., None]):
    handler = signal.getsignal(signal.SIGTERM)
    check_stopped(lambda _: os.kill(os.getpid(), number))
    assert signal.getsignal(signal.SIGTERM) == handler


def test_ctrl_c_that_compiled_code_turns_into_another_error_ends_a_command_in_a_line(check_stopped):
    def work(_: Path):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        except KeyboardInterrupt as error:  # as pydantic did while it built a class
            raise RuntimeError("Error building validator") from error

    check_stopped(work)


@pytest.mark.parametrize("has_own_handler", [False, True], ids=["command", "training"])
def test_ctrl_c_that_a_finalizer_ignores_still_ends_a_command(has_own_handler: bool, check_stopped):
    class Interrupted:
        def __del__(self):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0)  # Python raises here, and prints that the exception is ignored

    def raise_interrupt(*_: object):  # as training does at a second signal, without the handler of the commands
        raise KeyboardInterrupt

    def work(_: Path):
        if has_own_handler:
            signal.signal(signal.SIGINT, raise_interrupt)
        Interrupted()
        time.sleep(60)

    check_stopped(work)
