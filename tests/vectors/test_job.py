"""One process's share of embedding: what its parts depend on, and that no NaN is written."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from dmlkit.distributed.launch import start_fabric
from dmlkit.errors import UserError
from dmlkit.loading.inputs import TransformedImages
from dmlkit.model import build_model
from dmlkit.recipe.file import parse_recipe
from dmlkit.recipe.plugin import PluginRecord
from dmlkit.vectors.images import ImageList
from dmlkit.vectors.job import EmbedJob, PartEmbedder
from dmlkit.vectors.trained import TrainedModel
from tests.conftest import TINY_RECIPE
from tests.vectors.stored import manifest


@pytest.fixture
def trained() -> TrainedModel:
    """A model that was never trained."""
    recipe = parse_recipe(TINY_RECIPE, "tiny.yaml")
    return TrainedModel.of(recipe, build_model(recipe).eval())


def job_of(home: Path) -> EmbedJob:
    """Six images: the first is black, and each is brighter than the one before."""
    for index in range(6):
        Image.new("RGB", (16, 16), (40 * index,) * 3).save(home / f"{index}.png")
    paths = [str(home / f"{index}.png") for index in range(6)]
    return EmbedJob(ImageList(paths), "photos", home / "out", skip_bad_images=False)


def test_a_job_is_described_as_its_embeddings_are(trained: TrainedModel, tmp_path: Path):
    found = json.loads(json.dumps(job_of(tmp_path).describe(trained)))
    stored = manifest()
    assert stored.pop("format") == 1  # a job is no file of its own
    assert [found.pop(key) for key in ("fusion", "computation", "aligned_to")] == [None] * 3
    assert list(found) == [*(key for key in stored if key not in ("count", "skipped")), "list"]
    for key in ("dmlkit", "dim", "features", "dtype", "manifold", "similarity", "source"):
        assert found[key] == stored[key]
    assert found["model"].keys() == stored["model"].keys() and (
        found["model"]["backbone"] == stored["model"]["backbone"] | {"tuning": {"name": "full"}}
    )
    expected = {**stored["preprocessing"], "name": "plain"}
    assert found["preprocessing"] == {key: expected[key] for key in found["preprocessing"]}


def test_a_job_does_not_go_on_with_other_code_of_a_plugin(
    trained: TrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    job = job_of(tmp_path)
    for sha256 in ("a" * 64, "b" * 64):
        record = PluginRecord(name="toy.py", version=None, sha256=sha256)
        monkeypatch.setattr("dmlkit.vectors.job.plugins_of", lambda _, record=record: (record,))
        if sha256[0] == "a":
            job.parts.begin(job.describe(trained))
    with pytest.raises(UserError, match=r"parts with other settings \(plugins.*aaaa.*bbbb"):
        job.parts.check(job.describe(trained))


def test_an_image_whose_embedding_is_not_finite_stops_the_job(trained: TrainedModel, tmp_path: Path):
    job = job_of(tmp_path)
    job.parts.begin(job.describe(trained))
    forward = trained.model.forward

    def diverged(images: torch.Tensor) -> torch.Tensor:
        bright = images.float().mean(dim=(1, 2, 3)) > 150  # the fifth image and the sixth
        return forward(images).masked_fill(bright[:, None], torch.nan)

    trained.model.forward = diverged
    with pytest.raises(UserError, match=r"4\.png: its embedding has nan or inf"):
        PartEmbedder(job, trained, start_fabric("cpu"), workers=0)([0], lambda _: None)
    assert not list((tmp_path / "out").rglob("*.safetensors"))
    trained.model.forward = forward
    PartEmbedder(job, trained, start_fabric("cpu"), workers=0)([0], lambda _: None)
    assert len(list((tmp_path / "out").rglob("*.safetensors"))) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not fork")
@pytest.mark.timeout(60)
def test_a_job_whose_reader_is_killed_ends_with_a_line_and_resumes(
    trained: TrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    job = job_of(tmp_path)
    job.parts.begin(job.describe(trained))
    with monkeypatch.context() as patch:
        patch.setattr(TransformedImages, "__getitem__", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        with pytest.raises(
            UserError, match=r"reads images was killed.*; finished parts are kept: rerun the same"
        ) as caught:
            PartEmbedder(job, trained, start_fabric("cpu"), workers=1)([0], lambda _: None)
    assert "\n" not in str(caught.value) and not list((tmp_path / "out").rglob("*.safetensors"))
    PartEmbedder(job, trained, start_fabric("cpu"), workers=1)([0], lambda _: None)
    assert len(list((tmp_path / "out").rglob("*.safetensors"))) == 1
