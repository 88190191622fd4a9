"""One process's share of filling a store: its parts and batches, what they depend on, and that no NaN is written."""

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from dmlkit.distributed.launch import start_ranks
from dmlkit.loading.inputs import TransformedImages
from dmlkit.model import build_model
from dmlkit.recipe.file import parse_recipe
from dmlkit.recipe.plugin import PluginRecord
from dmlkit.transforms.presets import PlainConfig
from dmlkit.vectors.fill import FillJob, PartEmbedder, fill
from dmlkit.vectors.images import ImageList
from dmlkit.vectors.in_memory import embed_dataset
from dmlkit.vectors.progress_bar import no_bar
from dmlkit.vectors.store import VectorStore, image_keys, stored_model
from dmlkit.vectors.trained import TrainedModel
from tests.conftest import TINY_RECIPE, refuses


@pytest.fixture
def trained() -> TrainedModel:
    """A model that was never trained."""
    recipe = parse_recipe(TINY_RECIPE, "tiny.yaml")
    torch.manual_seed(0)  # some networks map gray images to 0, which has no direction
    return TrainedModel.of(recipe, build_model(recipe).eval())


def job_of(home: Path, trained: TrainedModel, images: int = 6) -> FillJob:
    """Six images: the first is black, and each is brighter than the one before."""
    for index in range(images):
        Image.new("RGB", (16, 16), (40 * index % 256,) * 3).save(home / f"{index}.png")
    dataset = ImageList([str(home / f"{index}.png") for index in range(images)])
    keys, model = image_keys(dataset), stored_model(trained)
    return FillJob(dataset, keys, home / "out", model, needs_all="repair it", missing=np.arange(images))


def listed(images: int, missing: np.ndarray | None = None) -> FillJob:
    """A job of images that are not there."""
    dataset: Any = range(images)
    model: Any = SimpleNamespace(description={"dim": 8})
    missing = np.arange(images) if missing is None else missing
    return FillJob(dataset, np.empty((images, 24)), Path(), model, missing=missing)


def test_parts_cover_every_image_once():
    for images in (0, 1, 127, 128, 129, 8192, 60_502, 530_001):  # the last needs more than 64 of the largest parts
        job = listed(images)
        covered = [row for part in job.numbers() for batch in job.batches(part) for row, _ in batch]
        assert covered == list(range(images))
        assert all(1 <= len(job.rows(part)) <= 8192 for part in job.numbers())
        assert len(job.numbers()) >= min(33, -(-images // 128))  # enough for some workers to share


def test_batches_are_those_of_the_whole_list_without_what_is_known():
    """So that a point is the same to the bit after a kill, whoever goes on."""
    random = np.random.default_rng(0)
    whole = {row: number for number in range(300) for row in range(128 * number, 128 * number + 128)}
    for images in (1, 500, 20_000):
        missing = np.flatnonzero(random.random(images) < 0.3)
        job = listed(images, missing)
        batches = [[row for row, _ in batch] for part in job.numbers() for batch in job.batches(part)]
        assert [row for batch in batches for row in batch] == missing.tolist()
        assert [len({whole[row] for row in batch}) for batch in batches] == [1] * len(batches)
        assert len({whole[batch[0]] for batch in batches}) == len(batches)


def test_points_of_other_code_of_a_plugin_another_device_or_transform_have_another_key(trained, monkeypatch):
    keys = {stored_model(trained).key, stored_model(trained, "cuda").key}
    transform = PlainConfig(size=18)
    keys.add(stored_model(replace(trained, recipe=trained.recipe.model_copy(update={"transform": transform}))).key)
    for sha256 in ("a" * 64, "b" * 64):
        record = PluginRecord(name="toy.py", version=None, sha256=sha256)
        monkeypatch.setattr("dmlkit.vectors.store.plugins_of", lambda _, record=record: (record,))
        keys.add(stored_model(trained).key)
    assert len(keys) == 5 and stored_model(trained).key in keys


def test_a_process_that_sees_another_folder_or_computes_otherwise_stops(trained: TrainedModel, tmp_path: Path):
    job = job_of(tmp_path, trained)
    refuses(r"model\.json: missing; expected a description of stored points", job.check_reachable)
    job.path.mkdir(parents=True)
    job.model.write(job.path / "model.json")
    job.check_reachable()
    other = replace(job, model=job.model.model_copy(update={"software": {"torch": "1.0"}}))
    refuses(r"model\.json: missing; expected a description of stored points", other.check_reachable)


def test_parts_that_do_not_arrive_are_reported(trained: TrainedModel, tmp_path: Path):
    job = job_of(tmp_path, trained)
    options: Any = {"bar": no_bar, "compute": lambda *_: None}
    refuses("lacks 6 points, although a worker has written", fill, job, trained, start_ranks("cpu"), **options)


def test_a_worker_computes_one_part_after_another(trained: TrainedModel, tmp_path: Path):
    """As on a GPU: its readers stay; together they are the points of one pass."""
    job, counts = job_of(tmp_path, trained, 300), list[int]()
    worker = PartEmbedder(job, trained, start_ranks("cpu"), workers=2)
    for number in (2, 0, 1):
        worker([number], counts.append)
    assert counts == [44, 128, 128]
    store = VectorStore.at(job.path, trained)
    whole = embed_dataset(start_ranks("cpu"), trained.model, job.dataset, trained.recipe.transform, workers=0)
    assert torch.equal(store.points_at(store.find(job.keys, exact=True)), whole.points)


def test_an_image_whose_embedding_is_not_finite_stops_the_job(trained: TrainedModel, tmp_path: Path):
    job = job_of(tmp_path, trained)
    forward = trained.model.forward

    def diverged(images: torch.Tensor) -> torch.Tensor:
        bright = images.float().mean(dim=(1, 2, 3)) > 150  # the fifth image and the sixth
        return forward(images).masked_fill(bright[:, None], torch.nan)

    trained.model.forward = diverged
    embed = PartEmbedder(job, trained, start_ranks("cpu"), workers=0)
    refuses(r"4\.png: its embedding has nan or inf", embed, [0], lambda _: None)
    assert not list((tmp_path / "out").rglob("*.safetensors"))
    trained.model.forward = forward
    embed([0], lambda _: None)
    assert len(list((tmp_path / "out").rglob("*.safetensors"))) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not fork")
@pytest.mark.timeout(60)
def test_a_job_whose_reader_is_killed_ends_with_a_line_and_resumes(trained, tmp_path, monkeypatch):
    job = job_of(tmp_path, trained)
    with monkeypatch.context() as patch:
        patch.setattr(TransformedImages, "__getitem__", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        embed = PartEmbedder(job, trained, start_ranks("cpu"), workers=1)
        refuses(r"reads images was killed.*; finished parts are kept: rerun the", embed, [0], lambda _: None)
    assert not list((tmp_path / "out").rglob("*.safetensors"))
    PartEmbedder(job, trained, start_ranks("cpu"), workers=1)([0], lambda _: None)
    assert len(list((tmp_path / "out").rglob("*.safetensors"))) == 1
