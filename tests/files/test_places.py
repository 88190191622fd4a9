"""Outputs inside data, a run or a gallery are refused with the reason; a run's own places are open."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

RECIPE = """\
dataset: {name: folder, root: photos, validation_fraction: 0.34}
transform: {name: plain, size: 16}
backbone: {name: small_cnn, width: 4}
embedding_dim: 4
loss: {name: triplet}
sampler: {name: random, batch_size: 6}
training: {epochs: 1, workers: 0}
"""
KINDS = ("npz", "parquet", "faiss", "tensorboard", "lancedb")
STUDY = "claim: c\nrecipe: r.yaml\nseeds: [0, 1, 2]\nvariants: {one: {}, other: {embedding_dim: 5}}\n"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with photos, a recipe and a study."""
    folder = tmp_path_factory.mktemp("places")
    random = np.random.default_rng(0)
    for label in range(8):
        (folder / "photos" / f"c{label}").mkdir(parents=True)
        for number in range(3):
            pixels = random.integers(0, 255, (20, 20, 3)).astype(np.uint8)
            Image.fromarray(pixels).save(folder / "photos" / f"c{label}" / f"{number}.png")
    (folder / "r.yaml").write_text(RECIPE)
    (folder / "s.yaml").write_text(STUDY)
    return folder


def test_no_command_writes_into_data_a_run_or_a_gallery(trained, dmlkit, monkeypatch):
    monkeypatch.chdir(trained)

    def works(*command: str) -> None:
        dmlkit(*command).ok()

    works("train", "r.yaml", "-o", "run")
    works("embed", "run", "photos", "-o", "emb")
    works("embed", "run", "--split", "test", "-o", "split")
    works("gallery", "create", "run", "photos", "-o", "birds")
    works("embed", "run", "photos", "-o", "run/embeddings/mine")  # a run's own places
    works("export", "emb", "--format", "npz", "-o", "run/exports/e.npz")
    works("plot", "histogram", "run", "-o", "run/plots/h.png")
    works("plot", "histogram", "run", "-o", "photos/h.pdf")  # no image that a dataset reads
    (trained / "photos" / "h.pdf").unlink()
    before = set(trained.rglob("*"))
    commands = [
        ("train", "r.yaml", "-o"),
        ("study", "s.yaml", "-o"),
        ("embed", "run", "photos", "-o"),
        ("gallery", "create", "run", "photos", "-o"),
        ("export", "run", "--format", "safetensors", "-o"),
        *(
            ("export", source, "--format", kind, "-o")
            for source, kind in (*(("emb", kind) for kind in KINDS), ("split", "lancedb"))
        ),
    ]
    cached = "backbone.tuning={name: none, cache: %s}"
    for place, reason in (
        ("photos/new", "where every file is read as data"),
        ("run/new", "is inside a run"),
        ("birds/new", "is inside a gallery"),
    ):
        asked = [(*command, place) for command in commands]
        asked.append(("train", "r.yaml", "-o", "fresh", "--set", cached % place))
        for command in asked:
            result = dmlkit(*command)
            assert (result.code, reason in result.err) == (2, True), (command, result.err)
    for command in (
        ("train", "r.yaml", "-o", "fresh", "--set", cached % "photos"),
        ("train", "r.yaml", "-o", "fresh", "--set", cached % "fresh/mine"),
        ("export", "emb", "--format", "lancedb", "-o", "photos", "--table", "zz"),
        ("plot", "histogram", "run", "-o", "photos/c0/h.png"),
    ):
        assert dmlkit(*command).code == 2, command
    assert set(trained.rglob("*")) == before
