"""Vectors as a dataset: the same head as over images that give these vectors, and one line for what is no vector."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet
from torch import nn

from dmlkit.datasets import VectorsConfig
from dmlkit.errors import UserError
from dmlkit.losses import ProxyAnchor
from dmlkit.manifolds import Sphere
from dmlkit.recipe.file import dump_recipe, parse_recipe, read_recipe
from dmlkit.training.experiment import assemble
from dmlkit.training.train import train
from tests.conftest import refuses
from tests.datasets.trees import photo

CLASSES, EACH, WIDTH = 12, 6, 5
RECIPE = """\
seed: 3
dataset: {{name: vectors, embeddings: {folder}/x.npy, labels: {folder}/y.npy, validation_fraction: 0.34}}
backbone: {{name: identity}}
embedding_dim: 4
loss: {{name: proxy_anchor}}
sampler: {{name: random, batch_size: 8}}
optimizer: {{name: adamw, lr: 0.003, lr_multipliers: {{loss: 10}}}}
training: {{epochs: 3}}
metrics: [recall@1, map@r]
"""


def arrays() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    centers = generator.normal(size=(CLASSES, WIDTH)).repeat(EACH, 0)
    return (centers + 0.5 * generator.normal(size=centers.shape)).astype(np.float32), np.arange(CLASSES).repeat(EACH)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """Of vectors on disk."""
    vectors, labels = arrays()
    np.save(tmp_path / "x.npy", vectors)
    np.save(tmp_path / "y.npy", labels)
    (tmp_path / "vectors.yaml").write_text(RECIPE.format(folder=tmp_path))
    return tmp_path / "vectors.yaml"


def test_training_is_that_of_a_plain_loop_to_the_bit(recipe: Path, tmp_path: Path):
    train(recipe, tmp_path / "run", device="cpu")
    state = torch.load(tmp_path / "run" / "checkpoints" / "last.pt", weights_only=True)

    vectors, labels = map(torch.from_numpy, arrays())
    vectors, labels = vectors[: 3 * EACH], labels[: 3 * EACH]  # half of 12 train, 3 of these 6 validate
    sampler = read_recipe(recipe).sampler.build(labels, 3)
    torch.manual_seed(3)
    head = nn.Linear(WIDTH, 4)
    nn.init.kaiming_normal_(head.weight, mode="fan_out")
    nn.init.zeros_(head.bias)
    sphere = Sphere(4)
    loss = ProxyAnchor(sphere, 3, margin=0.1, scale=32.0)
    groups = [{"params": list(head.parameters()), "lr": 0.003}, {"params": list(loss.parameters()), "lr": 0.03}]
    optimizer = torch.optim.AdamW(groups, weight_decay=1e-4, eps=1e-8, fused=True)
    for epoch in range(3):
        for batch in sampler.batches(epoch):
            value = loss(sphere.from_features(head(vectors[batch])), labels[batch])
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
    weights = list(state["model"].values())
    assert [weight.shape for weight in weights] == [(4, WIDTH), (4,)]
    assert all(torch.equal(weight, own) for weight, own in zip(weights, head.parameters(), strict=True))
    assert torch.equal(state["objective"]["loss.proxies"], loss.proxies)


@pytest.mark.parametrize("kind", ["float16", ">f4", "parquet", "folder"])
def test_every_file_gives_the_same_vectors(kind: str, recipe: Path, tmp_path: Path):
    vectors, labels = arrays()
    vectors = vectors.astype(np.float16).astype(np.float32)  # exact in all of them
    options: dict[str, Any] = {"embeddings": str(tmp_path / "other.npy"), "labels": str(tmp_path / "y.npy")}
    names = [f"{name:02}" for name in labels]
    if kind == "parquet":
        options = {"embeddings": str(tmp_path / "other.parquet"), "labels": "species"}
        parquet.write_table(pa.table({"embedding": vectors.tolist(), "species": names}), options["embeddings"])
    elif kind == "folder":
        options = {"embeddings": str(tmp_path / "folder")}
        (tmp_path / "folder").mkdir()
        np.save(tmp_path / "folder" / "embeddings.npy", vectors)
        (tmp_path / "folder" / "manifest.json").write_text("{}")
        items = {"id": range(len(labels)), "path": [f"{row}.jpg" for row in range(len(labels))], "label": names}
        parquet.write_table(pa.table(items), tmp_path / "folder" / "items.parquet")
    else:
        np.save(tmp_path / "other.npy", vectors.astype(kind))
    config = VectorsConfig(**options, validation_fraction=0.34)
    found = {split: config.build(split) for split in ("train", "validation", "test")}
    assert [(len(data), len(data.class_names)) for data in found.values()] == [(18, 3), (18, 3), (36, 6)]
    for start, data in zip((0, 18, 36), found.values(), strict=True):
        rows = torch.stack([data.sample(index) for index in range(len(data))])
        assert data.num_features == WIDTH and rows.dtype == torch.float32
        assert np.array_equal(rows.numpy(), vectors[start : start + len(data)])
        assert data.labels.tolist() == (labels[start : start + len(data)] - start // EACH).tolist()
    if kind == "folder":
        assert found["test"].paths[0] == "36.jpg" and found["test"].key(0).endswith("embeddings.npy:36")


def test_splits_say_what_trains_and_tests(recipe: Path, tmp_path: Path):
    np.save(tmp_path / "splits.npy", np.array(["test", "validation", "train"]).repeat(CLASSES * EACH // 3))
    embeddings, labels, splits = (str(tmp_path / f"{name}.npy") for name in ("x", "y", "splits"))
    config = VectorsConfig(embeddings=embeddings, labels=labels, splits=splits)
    names = {split: config.build(split).class_names for split in ("train", "validation", "test")}
    assert names == {"train": ("8", "9", "10", "11"), "validation": ("4", "5", "6", "7"), "test": ("0", "1", "2", "3")}


def test_blank_paths_are_named_by_their_rows_and_a_column_of_groups_is_read(tmp_path: Path):
    vectors, labels = arrays()
    cells = {"embedding": list(vectors), "label": labels, "path": [None, "b.jpg"] * 36, "group": ["g", None, "g"] * 24}
    file = tmp_path / "x.parquet"
    parquet.write_table(pa.table(cells), file)
    test = VectorsConfig(embeddings=str(file)).build("test")
    assert list(test.paths)[:3] == [f"{file}:36", "b.jpg", f"{file}:38"]
    assert test.groups is not None and len(test.groups.unique()) == 1 + 12  # "g", and each of those without a group
    listing = VectorsConfig(embeddings=str(file), labels="group").listing()
    assert listing.groups is None and listing.class_names == ["g"]


VALUES, CODES = arrays()


def changed(row: int, column: int, value: float) -> np.ndarray:
    bad = VALUES.astype(np.float64)
    bad[row, column] = value
    return bad


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (changed(17, 3, np.nan), {}, r"bad.npy: row 17 \(counted from 0\) contains nan or inf"),
        (changed(3, 0, 1e300), {}, r"bad.npy: row 3 \(counted from 0\) contains nan or inf"),  # in float32
        (VALUES.astype(np.complex64), {}, "bad.npy: expected real numbers of up to 64 bits, got complex64"),
        (VALUES[0], {}, r"bad.npy has shape \(5,\); expected an array of 2 dimensions \(N, D\)"),
        (VALUES[:0], {}, r"bad.npy has shape \(0, 5\); expected an array of 2 dimensions \(N, D\)"),
        (VALUES, {"labels": None}, r"dataset.labels: .*bad.npy has no column 'label' \(an .npy file has none\)"),
        (VALUES, {"labels": "x.npy"}, r"dataset.labels: .*x.npy has type float32; expected integers or text"),
        (VALUES, {"labels": "one.npy"}, "bad.npy: no vectors for train; expected at least two classes"),
        (VALUES, {"embeddings": "."}, "has no embeddings; expected a folder that dmlkit embed has finished"),
        (VALUES, {"embeddings": "vectors.yaml"}, r"vectors.yaml: expected a file of vectors \(.*\), or a folder"),
        ({"label": pa.nulls(72), "embedding": VALUES.tolist()}, {}, "bad.parquet: no vector has a label"),
    ],
    ids=range(11),
)
def test_what_is_no_vector_is_told_in_one_line(content, options, message, recipe, monkeypatch):
    monkeypatch.chdir(recipe.parent)
    np.save("one.npy", 0 * CODES)
    if isinstance(content, dict):
        parquet.write_table(pa.table(content), "bad.parquet")
        options = {"embeddings": "bad.parquet", "labels": None}
    else:
        np.save("bad.npy", content, allow_pickle=True)
    given = {"embeddings": "bad.npy", "labels": "y.npy"} | options
    refuses(message, VectorsConfig(**{key: value for key, value in given.items() if value}).build, "train")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("transform.size=32", "transform: got plain, but dataset vectors has vectors"),
        ("transform={name: plain}", "transform: got plain, but dataset vectors has vectors"),
        ("backbone={name: small_cnn}", "backbone.name: small_cnn takes images, but .* use identity"),
        ("dataset={name: glyphs}", "backbone.name: identity takes vectors, but dataset glyphs has images"),
        ("dataset.on_bad_image=skip", "vectors needs dataset.on_bad_image error, got skip"),
        ("training.compile=true", "identity needs training.compile False, got True"),
        ("backbone.freeze_epochs=1", "identity needs backbone.freeze_epochs 0, got 1"),
        ("optimizer.lr_multipliers.backbone=0.5", "identity needs optimizer.lr_multipliers.backbone 1.0, got 0.5"),
    ],
)
def test_a_recipe_whose_parts_do_not_meet_is_refused_when_it_is_read(override: str, message: str, recipe: Path):
    refuses(message, read_recipe, recipe, [override])


def test_a_transform_is_left_out_for_vectors_alone(recipe: Path):
    read = read_recipe(recipe)
    assert read.transform is None and parse_recipe(dump_recipe(read), "again.yaml") == read
    with pytest.raises(UserError, match="transform: got null, but dataset glyphs has images"):
        parse_recipe("dataset: {name: glyphs}\nloss: {name: triplet}\ntransform: null", "r.yaml")


def test_commands_take_a_run_over_vectors(recipe: Path, tmp_path: Path, dmlkit: Callable[..., Any]):
    run = tmp_path / "run"
    assert dmlkit("train", recipe, "-o", run).code == 0
    (tmp_path / "y.npy").rename(tmp_path / "z.npy")  # a new file needs none of the dataset
    np.save(tmp_path / "new.npy", arrays()[0][:7].astype(np.float64))
    assert "7 embeddings of 4 dimensions" in dmlkit("embed", run, tmp_path / "new.npy").out
    (tmp_path / "z.npy").rename(tmp_path / "y.npy")
    assert dmlkit("embed", run, "--split", "all").code == 0
    embedded = [np.load(run / "embeddings" / name / "embeddings.npy") for name in ("new.npy", "all")]
    assert np.array_equal(embedded[0], embedded[1][:7])
    for command in (("eval", run), ("embed", run, "--split", "test"), ("data", "check", recipe), ("curvature", run)):
        dmlkit(*command).ok()

    np.save(tmp_path / "wide.npy", np.zeros((3, 9), dtype=np.float32))
    photo(tmp_path / "photos" / "1.png", 1)
    refused = {
        ("embed", run, tmp_path / "wide.npy"): "got vectors of 9 numbers, but the model takes vectors of 5 numbers",
        ("embed", run, tmp_path / "photos"): "is a folder, but the model takes vectors",
        ("eval", run, tmp_path): "these are images, but the run takes vectors",
    }
    for command, message in refused.items():
        dmlkit(*command).refused(message)


def test_exports_take_vectors(recipe: Path, tmp_path: Path, dmlkit: Callable[..., Any]):
    import onnxruntime

    from dmlkit.export.model import ModelManifest

    assert dmlkit("train", recipe, "-o", tmp_path / "run", "--set", "training.epochs=1").code == 0
    for file_format in ("onnx", "torch-export", "safetensors"):
        target = tmp_path / f"model.{file_format}"
        result = dmlkit("export", tmp_path / "run", "--format", file_format, "-o", target)
        assert "agrees with the run on 16 vectors" in result.out, result.err
        assert ModelManifest.read(tmp_path / f"model.{file_format}.json").input == "vectors: float32 (batch, 5)"
    output: Any = onnxruntime.InferenceSession(tmp_path / "model.onnx").run(None, {"vectors": arrays()[0][:3]})
    assert output[0].shape == (3, 4)


@pytest.mark.parametrize("row", [5, 3 * EACH + 1], ids=["train", "validation"])
def test_a_vector_of_zeros_has_no_direction_on_the_sphere(row: int, recipe: Path, tmp_path: Path):
    """`eval` refuses it too; in flat space it is a place like others."""
    vectors = arrays()[0]
    vectors[row] = 0
    np.save(tmp_path / "x.npy", vectors)
    with pytest.raises(UserError, match=rf"1 of \d+ vectors are zero .* the first is {tmp_path / 'x.npy'}:{row};"):
        train(recipe, tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()
    assemble(read_recipe(recipe, ["manifold={name: euclidean}"]))
