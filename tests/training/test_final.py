"""The last training: on every class, for the epochs that validation chose, and without a figure of its own."""

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image
from safetensors.numpy import load_file

from dmlkit.recipe.file import parse_recipe
from dmlkit.run_folder.folder import RunFolder, aligned_place, final_place
from dmlkit.training.summary import final_recipe
from dmlkit.training.train import train
from tests.conftest import END, TINY_RECIPE
from tests.processes import Forked, held_command_line, start, wait_until
from tests.training.test_train import assert_same_weights

pytestmark = pytest.mark.slow
CLASSES = 12  # of the tiny recipe, half of them for the test


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run whose summary names epoch 2 of 3 as the best, and its last training, in ``final``.

    A cosine depends on the number of epochs.
    """
    path = tmp_path_factory.mktemp("trained") / "run"
    train(parse_recipe(TINY_RECIPE, "tiny.yaml", ["schedule={name: cosine, warmup_epochs: 0.5}"]), path, device="cpu")
    summary = json.loads((path / "summary.json").read_text())
    summary["best"]["epoch"] = 2
    (path / "summary.json").write_text(json.dumps(summary))
    recipe, basis = final_recipe(path)
    train(recipe, path.with_name("final"), device="cpu", basis=basis)
    return path


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained, tmp_path / "run")


@pytest.fixture
def final(trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained.with_name("final"), tmp_path / "final")


def checkpoint(run: Path) -> dict[str, Any]:
    return RunFolder(run).load_checkpoint("last")


def test_every_class_belongs_to_no_fold(run):
    recipe = yaml.safe_load((run / "recipe.yaml").read_text())
    recipe["dataset"] |= {"split": "reality_check", "fold": 2, "classes": 32}
    (run / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    dataset = final_recipe(run)[0].dataset
    again = type(dataset)(**dataset.model_dump())  # its recipe can be read
    assert (again.split, again.fold) == ("all", 0)


def test_it_trains_on_every_class_for_the_epochs_that_validation_chose(dmlkit, run, tmp_path):
    assert dmlkit("final", run, "--device", "cpu").code == 0
    final = tmp_path / "run-final"
    assert checkpoint(final)["objective"]["loss.proxies"].shape[0] == CLASSES
    assert checkpoint(run)["objective"]["loss.proxies"].shape[0] < CLASSES / 2
    assert len(set(json.loads((final / "classes.json").read_text())["training_classes"])) == CLASSES
    rows, before = RunFolder(final).read_metrics(), RunFolder(run).read_metrics()
    assert [row.epoch for row in rows] == [1, 2]
    assert all(row.validation is None for row in rows)
    # the last step of an epoch, at whose rate a row is, comes later in it if it has more steps
    assert before[2].lr < rows[1].lr <= before[1].lr
    # by hand: a dataset that has the same classes, all of them for training, with the epochs cut after the second
    recipe = yaml.safe_load((run / "recipe.yaml").read_text())
    # the official split trains on the first half of twice as many glyphs: the same classes and images
    recipe["dataset"] |= {"classes": 2 * CLASSES, "validation_fraction": 0}
    recipe["training"]["stop_after"] = 2
    (tmp_path / "by_hand.yaml").write_text(yaml.safe_dump(recipe))
    assert dmlkit("train", tmp_path / "by_hand.yaml", "-o", tmp_path / "by_hand", "--device", "cpu").code == 0
    assert_same_weights(final, tmp_path / "by_hand")


def test_a_killed_run_resumes_to_the_same_bits(trained, run, tmp_path):
    final, marks = tmp_path / "killed", tmp_path / "marks"
    marks.mkdir()
    words = ("final", run, "-o", final, "--device", "cpu")
    process = Forked(held_command_line, 12, str(marks), *map(str, words))  # in the second epoch
    wait_until(lambda: any(marks.iterdir()), process)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=END)
    assert len(RunFolder(final).read_metrics()) == 1
    resumed = start(*words, "--resume")
    assert resumed.communicate(timeout=END)[0].count("epoch 1/2") == 0
    assert resumed.returncode == 0
    assert_same_weights(trained.with_name("final"), final)
    assert json.loads((final / "summary.json").read_text())["basis"]["run"] == str(run)


def test_a_last_training_that_goes_on_has_the_figures_of_its_run_as_it_is_now(dmlkit, run, final):
    assert json.loads((final / "summary.json").read_text())["basis"]["checkpoint"]["epoch"] == 2
    summary = json.loads((run / "summary.json").read_text())
    summary["best"]["epoch"] = 3  # the run was trained on, and its best epoch is a later one
    (run / "summary.json").write_text(json.dumps(summary))
    dmlkit("final", run, "-o", final, "--resume", "--device", "cpu").ok()
    resumed = json.loads((final / "summary.json").read_text())
    assert resumed["last"]["epoch"] == 3 and resumed["basis"]["checkpoint"] == summary["best"]


def test_messages_and_files_name_the_reference_run(dmlkit, run, tmp_path):
    out = dmlkit("final", run, "-o", tmp_path / "final", "--device", "cpu").out
    value = json.loads((run / "summary.json").read_text())["best"]["test"]["map@r"]
    reference = f"its reference is {run} (epoch 2), with test map@r {value:.3f}"
    line = f"trained on every class, so it has no test metrics of its own; {reference}"
    assert line in " ".join(out.split())
    summary = json.loads((tmp_path / "final" / "summary.json").read_text())
    assert summary["best"] is None
    assert summary["last"] == {"epoch": 2, "validation": None, "test": None}
    assert summary["basis"]["run"] == str(run)
    assert summary["basis"]["checkpoint"]["test"]["map@r"] == value
    final, photo = tmp_path / "final", tmp_path / "photo.png"
    Image.new("RGB", (16, 16)).save(photo)
    assert "every class was trained on" in " ".join(dmlkit("eval", final, "--split", "all").out.split())
    for command in (
        ["eval", final],
        ["eval", final, "--split", "validation"],
        ["eval", final, "--set", "dataset.split=official"],
        ["calibrate", final],
        ["calibrate", final, "--set", "dataset.split=official"],
        ["verify", final, photo, photo],
        ["compare", run, final],
        ["inspect", final, "-o", tmp_path / "page.html"],
        ["plot", "pca", final],
        ["embed", final, "--split", "test"],
    ):
        refused = dmlkit(*command).refused("was trained on every class", reference)
        assert f"; use {run}" in refused.err or f"; use dmlkit {command[0]} {run} --split test" in refused.err


def test_it_is_used_as_any_run(dmlkit, final):
    assert dmlkit("embed", final, "--split", "all", "--device", "cpu").code == 0
    assert dmlkit("search", final, final / "embeddings" / "all", "--json").json()
    assert dmlkit("export", final, "--format", "safetensors").code == 0
    assert dmlkit("cluster", final, "-k", "4", "--device", "cpu").code == 0


@pytest.mark.parametrize(("here", "given"), [("runs/mine", "."), ("runs/mine/checkpoints", ".."), ("runs", "mine")])
def test_the_new_run_lies_next_to_a_run_that_is_named_from_inside(tmp_path, monkeypatch, here, given):
    (tmp_path / here).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / here)
    places = [place(Path(given), None).resolve() for place in (aligned_place, final_place)]
    assert places == [tmp_path.resolve() / "runs" / name for name in ("mine-aligned", "mine-final")]


def test_a_reference_run_that_is_named_from_inside_is_recorded_by_its_path(run, monkeypatch):
    monkeypatch.chdir(run)
    assert Path(final_recipe(Path())[1].run) == run.resolve()


def test_what_cannot_be_the_last_step_is_refused_in_one_line(dmlkit, trained, run, final, tmp_path):
    again = f"was trained on every class already, expected a run with test classes; use {trained}"
    dmlkit("final", final).refused(again)
    same = "is the run to train again on every class; expected another folder"
    dmlkit("final", run, "-o", run, "--overwrite").refused(same)
    dmlkit("final", run, "--overwrite", "--set", "training.epochs=1").refused("expected a key of the dataset")
    (run / "summary.json").unlink()
    dmlkit("final", run, "-o", tmp_path / "other").refused("is not finished, expected a summary.json")
    assert not (tmp_path / "other").exists()
    late = ("--set", "training.stop_after=4")
    dmlkit("train", run / "recipe.yaml", "-o", tmp_path / "other", *late).refused(
        "training.stop_after: got 4, expected at most training.epochs, 3"
    )


def test_a_frozen_backbone_computes_the_features_of_every_class(dmlkit, tiny_recipe, tmp_path):
    """In a shared cache, which still has the features of the first run."""
    frozen = ["--set", f"backbone.tuning={{name: none, cache: {tmp_path / 'cache'}}}", "--device", "cpu"]
    run = tmp_path / "run"
    assert dmlkit("train", tiny_recipe, "-o", run, *frozen).code == 0
    before = {path: path.read_bytes() for path in (tmp_path / "cache").rglob("*.safetensors")}
    assert dmlkit("final", run, "--device", "cpu").code == 0
    after = {path: path.read_bytes() for path in (tmp_path / "cache").rglob("*.safetensors")}
    assert before.items() <= after.items()
    assert sum(len(load_file(path)["keys"]) for path in after.keys() - before.keys()) == 6 * CLASSES


def test_a_study_needs_test_classes(dmlkit, tiny_recipe, tmp_path):
    study = tmp_path / "study.yaml"
    study.write_text(f"claim: Over seeds\nrecipe: {tiny_recipe.name}\nseeds: [0]\nvariants: {{tiny: {{}}}}\n")
    result = dmlkit("study", study, "-o", tmp_path / "out", "--set", "dataset.split=all")
    assert result.code == 2 and "tiny has dataset.split all, which leaves no test classes" in result.err
