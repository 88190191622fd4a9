"""Images that could not be read: where all are, no command goes on as if there were nothing to see."""

from pathlib import Path

import pytest

from dmlkit.distributed.launch import start_ranks
from dmlkit.recipe.file import read_recipe
from dmlkit.training.train import train
from tests.datasets import trees

RECIPE = """\
seed: 0
dataset: {{name: folder, root: '{root}', on_bad_image: skip, validation_fraction: 0}}
transform: {{name: plain, size: 16}}
backbone: {{name: small_cnn, width: 4}}
embedding_dim: 8
loss: {{name: proxy_anchor}}
sampler: {{name: random, batch_size: 4}}
training: {{epochs: 3, workers: 0}}
metrics: ["recall@1", "map@r"]
"""


def photos(root: Path) -> Path:
    return trees.photos(root, (f"class {index // 3}/{index}.png" for index in range(12)))


def spoil(root: Path) -> None:
    for path in root.rglob("*.png"):
        path.write_bytes(b"no image")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``run``, of one epoch, and its ``photos``."""
    home = tmp_path_factory.mktemp("home")
    (home / "recipe.yaml").write_text(RECIPE.format(root=photos(home / "photos")))
    train(read_recipe(home / "recipe.yaml", ["training.epochs=1"]), home / "run", device=start_ranks("cpu"))
    return home


@pytest.fixture
def spoilt(trained: Path):
    """The same, while no photo can be read."""
    spoil(trained / "photos")
    yield trained
    photos(trained / "photos")


def test_training_on_nothing_stops_after_an_epoch_w5(dmlkit, tmp_path: Path):
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(root=photos(tmp_path / "photos")))
    spoil(tmp_path / "photos")
    dmlkit("train", tmp_path / "recipe.yaml", "-o", tmp_path / "run", "--device", "cpu").refused(
        "the training split: none of 4 images could be read; the first: "
    )
    assert not (tmp_path / "run" / "summary.json").exists()


def test_training_goes_on_without_some(dmlkit, tmp_path: Path):
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(root=photos(tmp_path / "photos")))
    for number in (0, 1, 2, 3, 6):
        (tmp_path / "photos" / f"class {number // 3}" / f"{number}.png").write_bytes(b"no image")
    assert dmlkit("train", tmp_path / "recipe.yaml", "-o", tmp_path / "run", "--device", "cpu").code == 0


def test_evaluating_nothing_is_told_w5(dmlkit, spoilt: Path):
    for command in (("eval", spoilt / "run"), ("plot", "pca", spoilt / "run")):
        dmlkit(*command, "--device", "cpu").refused("the test split", ": none of 6 images could be read; the first: ")


def test_embedding_nothing_is_told_and_goes_on_once_it_is_mended_w5(dmlkit, spoilt: Path, tmp_path: Path):
    command = ("embed", spoilt / "run", spoilt / "photos", "-o", tmp_path / "out", "--device", "cpu")
    dmlkit(*command, "--skip-bad-images").refused(f"{spoilt / 'photos'}: none of 12 images could be read; the first: ")
    assert not (tmp_path / "out" / "parts").exists()
    photos(spoilt / "photos")
    assert "12 embeddings of 8 dimensions" in dmlkit(*command, "--skip-bad-images").ok().out.replace("\n", " ")
