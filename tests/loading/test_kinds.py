"""A third kind of samples, in one file of a plug-in, trains and is embedded like images and vectors."""

import json
from pathlib import Path

import pytest
import torch

from dmlkit.datasets.files.samples import ImageSamples, VectorSamples, samples_named
from tests.recipe.test_plugin import commands

SOUNDS = '''
"""Sounds: waves whose frequency is their class."""

from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from dmlkit.backbones.base import Backbone, BackboneConfig
from dmlkit.datasets.base import DatasetConfig
from dmlkit.datasets.files.dataset import Dataset
from dmlkit.datasets.files.samples import Samples


class SoundSamples(Samples, name="sound"):
    """Sounds (1, 64) float32."""

    def blank(self, size: int) -> Tensor:
        return torch.zeros(1, 1, 64)


class Waves(Dataset):
    """Sine waves at four phases."""

    kind = SoundSamples()
    in_memory = True

    def __init__(self, pitches: list[int]) -> None:
        names = [f"{pitch} waves" for pitch in pitches]
        paths = [f"{name}/{phase}" for name in names for phase in range(4)]
        super().__init__(torch.arange(len(names)).repeat_interleave(4), names, paths)
        self.pitches = pitches

    def sample(self, index: int) -> Tensor:
        label, phase = divmod(index, 4)
        return (torch.arange(64.0) * self.pitches[label] / 10 + phase).sin()[None]


class WavesConfig(DatasetConfig, frozen=True):
    """Sine waves."""

    sample: ClassVar = "sound"
    name: Literal["waves"] = "waves"

    def load(self, split: Literal["train", "test", "all"]) -> Waves:
        return Waves(list({"train": range(1, 20, 2), "test": range(2, 21, 2), "all": range(1, 21)}[split]))


class EarConfig(BackboneConfig, frozen=True):
    """One convolution."""

    sample: ClassVar = "sound"
    name: Literal["ear"] = "ear"

    def create(self) -> "Ear":
        return Ear()


class Ear(Backbone):
    """One convolution, then the mean over time."""

    num_features = 16

    def __init__(self) -> None:
        super().__init__()
        self.wave = nn.Conv1d(1, 16, 16)

    def forward(self, images: Tensor) -> Tensor:
        return self.wave(images).relu().mean(2)
'''
RECIPE = """\
dataset: {name: waves, validation_fraction: 0.3}
backbone: {name: ear}
embedding_dim: 8
loss: {name: triplet}
sampler: {name: random, batch_size: 8}
training: {epochs: 2, workers: 0}
metrics: [recall@1, map@r]
"""


@pytest.mark.slow
def test_a_third_kind_is_one_file(tmp_path: Path):
    (tmp_path / "sounds.py").write_text(SOUNDS)
    (tmp_path / "r.yaml").write_text(RECIPE)
    plugin = "--plugin sounds.py"
    lines = [
        f"train r.yaml -o run {plugin}",
        f"eval run --json {plugin}",
        f"embed run --split test {plugin}",
        f"export run --format safetensors {plugin}",
        f"eval r.yaml --json {plugin}",
        f"check r.yaml --set backbone.name=identity {plugin}",
        f"check r.yaml --set transform.name=plain {plugin}",
        f"embed run sounds.py -o new {plugin}",
        f"plot retrieval run {plugin}",
    ]
    outcomes = commands(tmp_path, *lines)
    assert [code for code, _, _ in outcomes] == [0] * 5 + [2] * 4, outcomes
    assert json.loads(outcomes[1][1])["metrics"]["recall@1"] > 0.1
    manifest = json.loads((tmp_path / "run/embeddings/test/manifest.json").read_text())
    assert manifest["preprocessing"] == {"input": "sounds, as they are", "num_features": None}
    assert manifest["count"] == 40
    described = json.loads((tmp_path / "run/exports/model.safetensors.json").read_text())
    assert described["input"] == "sounds: float32 (batch, 1, 64)"
    errors = [err.replace("\n", " ") for _, _, err in outcomes[5:]]
    assert "backbone.name: identity takes vectors, but dataset waves has sounds; use ear" in errors[0]
    assert "transform: got plain, but dataset waves has sounds, which are not transformed; remove it" in errors[1]
    assert "sounds.py: the model takes sounds, which are not read from files; use --split" in errors[2]
    assert "shows images, but" in errors[3] and "embeds sounds" in errors[3]


def test_kinds_are_equal_by_their_width():
    assert VectorSamples(3).fault(torch.zeros(3)) is None and VectorSamples(3).fault(torch.zeros(4)) == "shape (4,)"
    assert ImageSamples() == samples_named("image").of(None) != VectorSamples(3) != VectorSamples(4)
    with pytest.raises(ValueError, match="sample: got 'smell', expected one of image, vector"):
        samples_named("smell")


@pytest.mark.parametrize(
    "sample", [torch.zeros(1, 4, 4), torch.zeros(3, 4), torch.zeros(3, 0, 4), torch.zeros(3, 4, 4)]
)
def test_an_image_is_bytes_of_three_colors(sample: torch.Tensor):
    assert ImageSamples().fault(sample) and ImageSamples().fault(torch.zeros(3, 4, 5, dtype=torch.uint8)) is None
