"""What a step is shown: features that runs share, at the same time too, and that no fault of a disk makes others."""

import os
import shutil
import signal
import sys
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from dmlkit.distributed.stopping import TrainingStoppedError
from dmlkit.errors import UserError
from dmlkit.loading.inputs import TransformedImages
from dmlkit.recipe.file import read_recipe
from dmlkit.run_folder.documents import Summary
from dmlkit.run_folder.folder import RunFolder
from dmlkit.training.train import train
from dmlkit.vectors import fill
from tests.conftest import TINY_RECIPE, lighten, refuses
from tests.datasets import trees
from tests.processes import Forked, run_on_ranks
from tests.training.test_train import assert_same_weights
from tests.training.test_tuning import Stopper

NONE = "backbone.tuning={name: none}"
AUGMENTED = "transform={name: imagenet, size: 16, resize: 16}"
MANY = "dataset.images_per_class=50"  # 150 to train: two parts


def run_of(recipe: Path, run: Path, *overrides: str, **options: Any) -> Path:
    train(recipe, run, overrides=[NONE, *overrides], device="cpu", **options)
    return run


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "tiny.yaml").write_text(TINY_RECIPE)
    return tmp_path / "tiny.yaml"


def test_a_full_disk_is_told_and_the_parts_stay(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write, parts = fill.write_part, count()

    def full(*arguments: Any) -> None:
        if next(parts) == 1:
            raise OSError(28, "No space left on device")
        write(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(fill, "write_part", full)
        with pytest.raises(UserError, match=r"features/\w+: .*No space left on device; finished parts are kept; "):
            run_of(recipe, tmp_path / "run", MANY)
    assert len(list((tmp_path / "run").rglob("*.safetensors"))) == 1
    run_of(recipe, tmp_path / "run", MANY, resume=True)
    assert_same_weights(tmp_path / "run", run_of(recipe, tmp_path / "whole", MANY))


@pytest.mark.heavy
def test_runs_at_the_same_time_share_a_cache(recipe: Path, tmp_path: Path):
    shared = f"backbone.tuning.cache={tmp_path / 'shared'}"
    runs = [tmp_path / "one", tmp_path / "other"]
    started = [Forked(run_of, recipe, run, MANY, shared) for run in runs]
    for process in started:
        output, _ = process.communicate()
        assert process.returncode == 0, output
    assert_same_weights(*runs)
    numbers = [len(load_file(path)["keys"]) for path in (tmp_path / "shared").rglob("*.safetensors")]
    assert len(numbers) == 7 and sum(numbers) == 12 * 50  # none was computed twice


def no_computing(monkeypatch: pytest.MonkeyPatch):
    def fail(*_: Any) -> None:
        raise AssertionError("features were computed")

    monkeypatch.setattr(fill, "write_part", fail)


def test_runs_share_a_cache_which_overwrite_leaves(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shared = f"backbone.tuning.cache={tmp_path / 'shared'}"
    first = run_of(recipe, tmp_path / "first", shared)
    assert not (first / "features").exists()
    no_computing(monkeypatch)
    run_of(recipe, tmp_path / "other", shared, "loss={name: triplet}", "embedding_dim=4")
    run_of(recipe, first, shared, overwrite=True)
    assert_same_weights(first, run_of(recipe, tmp_path / "again", shared))


def test_folds_share_a_cache_in_which_test_images_are_once(recipe: Path, tmp_path: Path):
    shared, folds = tmp_path / "shared", "dataset.split=reality_check"
    for fold in (0, 1):
        given = (folds, "dataset.classes=16", f"dataset.fold={fold}")
        run = run_of(recipe, tmp_path / f"shared-{fold}", f"backbone.tuning.cache={shared}", *given)
        assert_same_weights(run, run_of(recipe, tmp_path / f"own-{fold}", *given))
    rows = np.concatenate([load_file(path)["keys"] for path in shared.rglob("*.safetensors")])
    assert len(rows) == 2 * 8 * 6 + 8 * 6  # training and validation images of each fold, in batches of their own


def test_overwrite_replaces_the_features_of_the_run(recipe: Path, tmp_path: Path):
    run = run_of(recipe, tmp_path / "run")
    run_of(recipe, run, "seed=4", overwrite=True)  # random weights of another seed
    assert_same_weights(run, run_of(recipe, tmp_path / "new", "seed=4"))
    run_of(recipe, run, "backbone.tuning.features=live", overwrite=True)
    assert not (run / "features").exists()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("backbone.tuning.feature_views=2", "none needs transform.augments True, got False"),
        ("backbone.tuning={name: none, features: live, feature_views: 2}", "need features: cached"),
        ("backbone.tuning={name: none, features: live, cache: shared}", "need features: cached"),
        ("backbone.tuning={name: none, features: live, engine: bf16}", "need features: cached"),
        ("backbone.tuning={name: last_blocks, cache: shared}", "cache needs feature_views"),
        ("backbone.tuning={name: last_blocks, feature_views: 2}", "last_blocks needs transform.augments True, got F"),
        ("training.compile=true", "none needs training.compile False, got True"),
        ("dataset.on_bad_image=skip", "none needs dataset.on_bad_image error, got skip"),
    ],
)
def test_options_that_would_be_ignored_are_refused(override: str, message: str, recipe: Path):
    refuses(message, read_recipe, recipe, [NONE, override])


def stopped(recipe: Path, run: Path, *overrides: str):
    """A run that is told to stop after the first step of its second epoch."""
    with pytest.raises(TrainingStoppedError, match="in epoch 2 after step 1"):
        run_of(recipe, run, *overrides, progress=Stopper(1, last=False))


def test_loggers_and_workers_may_differ_in_a_resumed_run(recipe, tmp_path, caplog):
    trees.photos(tmp_path / "photos", (f"{index // 4}/{index}.png" for index in range(24)))
    photos = f"dataset={{name: folder, root: {tmp_path / 'photos'}, validation_fraction: 0}}"
    images = (photos, AUGMENTED, "backbone.tuning={name: full}", "sampler.batch_size=4")
    stopped(recipe, tmp_path / "run", *images, "training.workers=0")
    run_of(recipe, tmp_path / "run", *images, "training.workers=2", "training.loggers=[tensorboard]", resume=True)
    now = RunFolder(tmp_path / "run").recipe().training
    assert (now.workers, now.loggers) == (2, ("tensorboard",)) and (tmp_path / "run" / "loggers.json").exists()
    assert_same_weights(tmp_path / "run", run_of(recipe, tmp_path / "whole", *images, "training.workers=0"))
    moved = shutil.move(tmp_path / "photos", tmp_path / "moved")
    run_of(recipe, tmp_path / "run", *images, f"dataset.root={moved}", "training.workers=0", resume=True)
    assert RunFolder(tmp_path / "run").recipe().dataset.root == str(moved)
    (moved / "0").rename(moved / "00")
    with pytest.raises(UserError, match=r"cannot continue without 1 of its 3 training classes \(0\)"):
        run_of(recipe, tmp_path / "run", *images, f"dataset.root={moved}", "training.workers=0", resume=True)
    (moved / "00").rename(moved / "0")
    images = (*images, f"dataset.root={moved}")
    (moved / "0" / "0.png").rename(tmp_path / "0.png")
    run_of(recipe, tmp_path / "run", *images, "training.workers=0", resume=True)
    assert "its training classes had 12 images when this run started, and have 11 now" in caplog.text
    (tmp_path / "0.png").rename(moved / "0" / "0.png")
    with pytest.raises(UserError, match=r"recipe has changed.*training\.ema: was None, now 0\.9"):
        run_of(recipe, tmp_path / "run", *images, "training.workers=0", "training.ema=0.9", resume=True)


@pytest.mark.parametrize("tuning", ["{name: none, feature_views: 2}", "{name: last_blocks, feature_views: 2}"])
def test_cached_features_resume_inside_an_epoch_to_the_bit(tuning, recipe, tmp_path):
    views = (AUGMENTED, f"backbone.tuning={tuning}")
    stopped(recipe, tmp_path / "run", *views)
    run_of(recipe, tmp_path / "run", *views, resume=True)
    assert_same_weights(tmp_path / "run", run_of(recipe, tmp_path / "whole", *views))


def test_a_run_keeps_its_maps_until_it_is_trained(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A stop keeps them; a finished run resumes without them and computes none, unless it trains longer."""
    maps, run = "backbone.tuning={name: last_blocks, feature_views: 0}", tmp_path / "run"
    stopped(recipe, run, maps)
    assert list((run / "features").rglob("*.safetensors"))
    run_of(recipe, run, maps, resume=True)
    assert not (run / "features").exists()
    before = Summary.read(run / "summary.json").last.test
    with monkeypatch.context() as patch:
        no_computing(patch)
        run_of(recipe, run, maps, resume=True)
    assert before is not None and Summary.read(run / "summary.json").last.test == pytest.approx(before)
    run_of(recipe, run, maps, "training.epochs=4", resume=True)
    assert_same_weights(run, run_of(recipe, tmp_path / "whole", maps, "training.epochs=4"))
    shared = maps.replace("0}", f"0, cache: {tmp_path / 'shared'}}}")
    assert_same_weights(run, run_of(recipe, tmp_path / "other", shared, "training.epochs=4"))
    assert list((tmp_path / "shared").rglob("*.safetensors"))


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not fork")
@pytest.mark.timeout(60)
def test_a_training_whose_reader_is_killed_says_so_and_resumes(recipe, tmp_path, monkeypatch):
    settings = ("training.workers=2", AUGMENTED, "backbone.tuning={name: full}")  # no cached features, which need none
    sample, parent = TransformedImages.__getitem__, os.getpid()

    def killed(self: TransformedImages, draw: Any) -> Any:
        if os.getpid() != parent and (tmp_path / "run" / "checkpoints" / "last.pt").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        return sample(self, draw)

    with monkeypatch.context() as patch:
        patch.setattr(TransformedImages, "__getitem__", killed)
        with pytest.raises(UserError, match=r"reads images was killed.*; continue with the same command and --resume"):
            run_of(recipe, tmp_path / "run", *settings)
    run_of(recipe, tmp_path / "run", *settings, resume=True)
    assert_same_weights(tmp_path / "run", run_of(recipe, tmp_path / "whole", *settings))


def overwrite(recipe: Path, run: Path) -> None:
    """Train a run, and another one in its place."""
    lighten()
    for seed, is_next in ((3, False), (5, True)):
        run_of(recipe, run, f"seed={seed}", "training.workers=0", "training.epochs=1", overwrite=is_next)


@pytest.mark.heavy
def test_two_ranks_store_the_features_of_a_new_run_beside_the_old_one(recipe: Path, tmp_path: Path):
    run_on_ranks(2, overwrite, recipe, tmp_path / "two")
    overwrite(recipe, tmp_path / "one")
    for run in (tmp_path / "one", tmp_path / "two"):
        assert RunFolder(run).recipe().seed == 5 and Summary.is_at(run / "summary.json")
        assert len(list((run / "features").iterdir())) == 1  # of the new run alone
