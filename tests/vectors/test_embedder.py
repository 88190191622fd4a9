"""The Python face, against the files that ``dmlkit embed`` writes and the manifold's own similarity."""

import pickle
from collections.abc import Callable
from copy import copy, deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from PIL import Image

import dmlkit as face
from dmlkit.distributed.launch import start_ranks
from dmlkit.manifolds import Euclidean
from dmlkit.vectors.embedder import Embedder
from tests.conftest import Cli, refuses
from tests.datasets import trees


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, trained_once: Callable[..., Path]) -> Path:
    """A trained run in ``run``, and 130 pictures in ``pictures``: more than a batch."""
    folder = tmp_path_factory.mktemp("face")
    trained_once(folder)
    trees.photos(folder / "pictures", (f"{index:03}.png" for index in range(130)))
    return folder


@pytest.fixture(scope="module")
def model(home: Path) -> Embedder:
    return face.load(str(home / "run"), device="cpu")


@pytest.fixture(scope="module")
def paths(home: Path) -> list[Path]:
    return sorted((home / "pictures").iterdir())


def test_paths_pictures_and_arrays_give_what_the_command_writes(home, model, paths, dmlkit):
    assert dmlkit("embed", home / "run", home / "pictures", "-o", home / "files", "--device", "cpu").code == 0
    written = np.load(home / "files" / "embeddings.npy")
    assert np.array_equal(model.embed(paths), written)
    assert np.array_equal(model.embed([str(path) for path in paths]), written)
    opened = [Image.open(path) for path in paths]
    assert np.array_equal(model.embed(opened), written)
    stacked = np.stack([np.asarray(image) for image in opened])
    assert np.array_equal(model.embed(stacked), written)
    np.testing.assert_allclose(model.embed([paths[0], opened[1], stacked[2]]), written[:3], atol=1e-6)
    assert model.embed([]).shape == (0, written.shape[1])


def test_a_process_of_a_pool_loads_the_model_again(model: Embedder, paths: list[Path]):
    sent = pickle.dumps(model)
    assert len(sent) < 1_000 and np.array_equal(pickle.loads(sent).embed(paths[:3]), model.embed(paths[:3]))


def test_the_model_is_loaded_again_from_another_folder(
    home: Path, tmp_path: Path, paths: list[Path], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(home)
    model = face.load("run", device="cpu")
    monkeypatch.chdir(tmp_path)
    assert np.array_equal(pickle.loads(pickle.dumps(model)).embed(paths[:3]), model.embed(paths[:3]))


@pytest.mark.parametrize("copied", [copy, deepcopy])
def test_a_copy_has_the_weights_of_its_model_and_not_of_the_files(
    home: Path, paths: list[Path], copied: Callable[[Embedder], Embedder]
):
    model = face.load(home / "run", device="cpu")
    before = model.embed(paths[:3])
    with torch.no_grad():
        for parameter in model.trained.model.parameters():
            parameter.mul_(1.5)
    after = model.embed(paths[:3])
    assert not np.allclose(before, after) and np.array_equal(copied(model).embed(paths[:3]), after)


def test_a_checkpoint_that_does_not_exist_is_named(home: Path):
    refuses("final.pt: there is no such checkpoint", face.load, home / "run", checkpoint="final")


def test_the_mode_of_a_model_is_set_only_if_it_trains(home: Path, paths: list[Path], monkeypatch: pytest.MonkeyPatch):
    network, modes = (embedder := face.load(str(home / "run"), device="cpu")).trained.model, list[bool]()
    train = type(network).train
    monkeypatch.setattr(type(network), "train", lambda self, mode=True: modes.append(mode) or train(self, mode))
    points = embedder.embed(paths[:2])
    assert modes == []
    network.train()
    assert np.array_equal(embedder.embed(paths[:2]), points) and modes == [True, False, True]


def test_similarity_is_the_manifold_s(model: Embedder, paths: list[Path]):
    points = model.embed(paths[:5])
    similarity = model.similarity(points, points[:3])
    tensors = torch.from_numpy(points)
    with torch.no_grad():
        assert np.array_equal(similarity, model.trained.model.manifold.similarity(tensors, tensors[:3]).numpy())


def test_distances_far_from_the_origin_are_those_of_numpy():
    x = np.random.default_rng(0).normal(size=(9, 4)).astype(np.float32) + np.float32(1000)
    model = cast(Any, SimpleNamespace(trained=SimpleNamespace(manifold=Euclidean(4)), _ranks=start_ranks("cpu")))
    expected = -np.linalg.norm(x.astype(np.float64)[:, None] - x, axis=2)
    np.testing.assert_allclose(Embedder.similarity(model, x, x), expected, atol=1e-5)


def test_evaluation_is_the_command_s(home: Path, dmlkit: Cli):
    report = face.evaluate(str(home / "run"), metrics=["recall@1"], device="cpu").report
    figures = dmlkit("eval", home / "run", "--metric", "recall@1", "--json", "--device", "cpu").json()
    assert report.metrics == figures["metrics"]


def test_a_run_over_vectors_embeds_arrays(tmp_path: Path):
    np.save(tmp_path / "x.npy", np.random.default_rng(0).normal(size=(40, 6)).astype(np.float32))
    np.save(tmp_path / "y.npy", np.arange(40) % 10)
    (tmp_path / "r.yaml").write_text(
        f"dataset: {{name: vectors, embeddings: {tmp_path}/x.npy, labels: {tmp_path}/y.npy}}\n"
        "backbone: {name: identity}\nembedding_dim: 4\nloss: {name: triplet}\ntraining: {epochs: 1}\n"
        "sampler: {name: random, batch_size: 8}\n"
    )
    face.train(tmp_path / "r.yaml", tmp_path / "run", device="cpu")
    model = face.load(tmp_path / "run", device="cpu")
    points = model.embed(np.load(tmp_path / "x.npy").astype(np.float64))
    assert points.shape == (40, 4) and points.dtype == np.float32
    for bad, message in (
        (np.zeros((2, 5)), r"expected an array \(N, 6\), got an array \(2, 5\)"),
        ([1.0], "got list"),
        (np.zeros((2, 6), np.complex64), r"got an array \(2, 6\) of complex64"),
        (np.array([[0.0] * 6, [0.0] * 5 + [np.nan]]), r"^vectors\[1\]: has nan or inf$"),
    ):
        refuses(message, model.embed, bad)


BAD: list[tuple[Any, str]] = [
    ("one.png", r"^embed: got one str, expected a list of images: embed\(\[image\]\)$"),
    (Image.new("RGB", (8, 8)), "^embed: got one Image"),
    (["gone.png"], "^gone.png: no such image file$"),
    ([3], r"^images\[0\]: expected a path, an image of Pillow's or an array, got int$"),
    ([np.zeros((8, 8, 3))], r"^images\[0\]: expected \(H, W, 3\) uint8 RGB, got \(8, 8, 3\) float64$"),
    (None, "^embed: got NoneType, expected a list of images or an array$"),
    (np.zeros((), np.uint8), "^embed: got ndarray, expected a list of images or an array$"),
    (["a" * 300], r"^a{200}\.\.\. \(300 characters\): no such image file$"),
    ([Image.new("RGB", (0, 8))], r"^images\[0\]: is 0 x 8 pixels$"),
    ([Image.new("La", (8, 8))], r"images\[0\]: cannot read this image"),
    (np.zeros((8, 8, 3), np.uint8), r"^images\[0\]: expected \(H, W, 3\) uint8 RGB, got \(8, 3\) uint8"),
]


@pytest.mark.parametrize(("images", "message"), BAD, ids=range(len(BAD)))
def test_what_is_no_image_is_told_in_one_line(images: Any, message: str, model: Embedder):
    refuses(message, model.embed, images)


@pytest.mark.parametrize("points", [None, [[0.0] * 8], np.zeros((2, 9)), np.zeros((2, 8), np.complex64)])
def test_points_that_are_no_embeddings_are_told(points: Any, model: Embedder):
    refuses(r"^similarity: expected b of shape \(N, 8\) and floats, got ", model.similarity, np.zeros((2, 8)), points)


def test_an_image_that_is_cut_off_or_closed_is_told(model: Embedder, paths: list[Path], tmp_path: Path):
    data = paths[0].read_bytes()
    (tmp_path / "cut.png").write_bytes(data[: len(data) // 2])
    closed = Image.new("RGB", (8, 8))
    closed.close()
    for image in (Image.open(tmp_path / "cut.png"), closed, tmp_path / "cut.png"):
        refuses(r"(images\[1\]|cut.png): cannot read this image", model.embed, [paths[0], image])
