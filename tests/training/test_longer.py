"""A finished run trains on where that gives the weights of a run that had as many epochs from the start."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from dmlkit.errors import UserError
from dmlkit.recipe.file import parse_recipe
from dmlkit.run_folder.documents import Summary
from dmlkit.run_folder.folder import RunFolder
from tests.conftest import TINY_RECIPE
from tests.training.test_train import assert_equal_weights, weights

Train = Callable[..., Any]
COSINE = "schedule={name: cosine, warmup_epochs: 0.5}"


@pytest.fixture
def train(dmlkit: Callable[..., Any], tiny_recipe: Path, tmp_path: Path) -> Train:
    def run(name: str, *overrides: str, resume: bool = False) -> Any:
        words = [part for one in overrides for part in ("--set", one)]
        return dmlkit(
            "train", tiny_recipe, "-o", tmp_path / name, *words, "--device", "cpu", *(["--resume"] if resume else [])
        )

    return run


@pytest.mark.parametrize(
    ("schedule", "first", "then"),
    [
        ("schedule={name: constant, warmup_epochs: 1.5}", ["training.epochs=2"], ["training.epochs=3"]),
        ("schedule={name: step, every: 2}", ["training.epochs=2"], ["training.epochs=3"]),
        (COSINE, ["training.epochs=3", "training.stop_after=2"], ["training.epochs=3"]),
    ],
)
def test_more_epochs_give_the_weights_of_as_many_from_the_start(schedule, first, then, train, tmp_path):
    assert train("run", schedule, *first).code == 0
    longer, whole = train("run", schedule, *then, resume=True), train("whole", schedule, *then)
    assert longer.code == whole.code == 0, longer.err
    runs = [RunFolder(tmp_path / name) for name in ("run", "whole")]
    for name in ("last", "best"):
        assert_equal_weights(*(weights(run.path, name) for run in runs))
    one, two = (Summary.read(run.summary_path) for run in runs)
    assert (one.last, one.best) == (two.last, two.best)
    assert [row.validation for row in runs[0].read_metrics()] == [row.validation for row in runs[1].read_metrics()]


def test_other_epochs_are_refused_with_the_way_on(train: Train, tmp_path: Path):
    assert train("run", COSINE, "training.epochs=2").code == 0
    before = RunFolder(tmp_path / "run").checkpoint_path("last").read_bytes()
    longer = train("run", COSINE, "training.epochs=3", resume=True)
    assert longer.code == 2 and "with the schedule cosine more epochs change those before them" in longer.err
    shorter = train("run", COSINE, "training.epochs=2", "training.stop_after=1", resume=True)
    assert shorter.code == 2 and "training.stop_after: was None, now 1" in shorter.err
    assert RunFolder(tmp_path / "run").checkpoint_path("last").read_bytes() == before


def test_a_finished_run_that_trains_on_is_unfinished_until_it_ends(train, dmlkit, tmp_path, monkeypatch):
    assert train("run", "schedule={name: constant}", "training.epochs=1").code == 0

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("dmlkit.training.train.finish_epoch", stop)
    assert train("run", "schedule={name: constant}", "training.epochs=2", resume=True).code == 130
    assert "is not finished" in dmlkit("final", tmp_path / "run", "-o", tmp_path / "final").refused().err


@pytest.mark.parametrize(
    ("backbone", "transform", "is_advised"),
    [
        ("resnet18, weights: imagenet", "imagenet", True),
        ("resnet18, weights: imagenet", "pretrained", False),  # what is published with a file is not known
        ("timm, model: tf_efficientnet_lite0, weights: imagenet", "pretrained", True),  # by the name of the model
        ("bn_inception", "imagenet", False),  # its files need other pixels
        ("small_cnn", "imagenet", False),  # it has no weights
    ],
)
def test_the_weights_of_a_run_are_advised_for_a_new_one_where_its_recipe_takes_them(
    backbone: str, transform: str, is_advised: bool, tmp_path: Path
):
    text = TINY_RECIPE.replace("{name: small_cnn, width: 4}", f"{{name: {backbone}}}")
    text = text.replace("{name: plain, size: 16}", f"{{name: {transform}}}") + "schedule: {name: cosine}\n"
    run, weights = RunFolder(tmp_path / "run"), f"backbone.weights={tmp_path / 'run' / 'checkpoints' / 'last.pt'}"
    run.create(parse_recipe(text, "r.yaml"), overwrite=False)
    with pytest.raises(UserError) as refusal:
        run.check_same_recipe(parse_recipe(text, "r.yaml", ["training.epochs=4"]))
    assert (f"from these weights: --set {weights}" in str(refusal.value)) == is_advised
    with nullcontext() if is_advised else pytest.raises(UserError, match=r"transform|backbone\.weights"):
        parse_recipe(text, "r.yaml", [weights])
