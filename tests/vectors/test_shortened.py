"""`dmlkit embed --dims`: the first coordinates of the full embeddings, normalized by NumPy, and searches among them."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dmlkit.model import build_model
from dmlkit.recipe.file import parse_recipe
from dmlkit.run_folder.folder import RunFolder
from dmlkit.vectors.trained import TrainedModel, shortened
from tests.conftest import ON_THE_BALL, ONE_EPOCH, Cli


@pytest.fixture(scope="module")
def place(trained_once: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, and photos of its test classes."""
    folder = tmp_path_factory.mktemp("short")
    trained_once(folder, ONE_EPOCH)
    dataset = RunFolder(folder / "run").recipe().dataset.build("test")
    (folder / "photos").mkdir()
    for index in range(12):
        pixels = dataset.sample(index).permute(1, 2, 0).numpy()
        Image.fromarray(pixels).save(folder / "photos" / f"{index:02}.png")
    return folder


@pytest.mark.slow
def test_short_embeddings_are_the_first_coordinates_of_the_full_ones(place: Path, tmp_path: Path, dmlkit: Cli):
    run, photos = place / "run", place / "photos"
    for options in ((), ("--dims", 3)):
        assert dmlkit("embed", run, photos, *options, "--device", "cpu").code == 0
    full = np.load(run / "embeddings" / "photos" / "embeddings.npy").astype(float)
    short = np.load(run / "embeddings" / "photos-3" / "embeddings.npy")
    expected = full[:, :3] / np.linalg.norm(full[:, :3], axis=1, keepdims=True)
    assert short.shape == (12, 3) and short == pytest.approx(expected, abs=1e-6)
    words = ("search", run / "embeddings" / "photos-3", photos / "04.png", "-k", 3, "--json", "--device", "cpu")
    assert [one["id"] for one in dmlkit(*words).json()["queries"][0]["neighbors"]] == (
        -expected @ expected[4]
    ).argsort()[:3].tolist()


@pytest.mark.slow
def test_a_split_has_a_folder_of_its_own_for_each_width(place: Path, dmlkit: Cli):
    run = place / "run"
    for options in ((), ("--dims", 4), ("--dims", 4)):
        result = dmlkit("embed", run, "--split", "test", *options, "--device", "cpu").ok()
    assert "embedded already" in result.out
    widths = [np.load(run / "embeddings" / name / "embeddings.npy").shape for name in ("test", "test-4")]
    assert widths == [(36, 8), (36, 4)]
    assert dmlkit("eval", run / "embeddings" / "test-4").code == 0
    assert dmlkit("search", run / "embeddings" / "test", run / "embeddings" / "test-4", "-k", 1).code == 2


@pytest.mark.slow
def test_widths_that_cannot_be_are_refused(place: Path, tmp_path: Path, dmlkit: Cli, trained_once: Callable[..., Path]):
    def refused(*arguments: object) -> str:
        return dmlkit("embed", *arguments, "-o", tmp_path / "out").refused().err

    run, photos = place / "run", place / "photos"
    assert "--dims 9: expected 1 to 8" in refused(run, photos, "--dims", 9)
    assert "--dims 2 applies to torch" in refused(run, photos, "--dims", 2, "--ray")
    product = trained_once(tmp_path / "product", ONE_EPOCH + "manifold: {name: product}\n")
    assert "--dims 2: the first features of a product are" in refused(product, photos, "--dims", 2)


@pytest.mark.parametrize("head", ["linear", "mobius_linear"])
def test_a_point_of_the_ball_is_clipped_before_it_is_cut_as_in_training(head: str):
    """Both models against the formula of the ball; features of the first rows alone would be longer."""
    text = ON_THE_BALL.replace("manifold:", f"head: {{name: {head}}}\nmanifold:")
    recipe = parse_recipe(text, "r.yaml", ["manifold.clip_distance=0.5", "loss.name=triplet"])
    torch.manual_seed(0)
    trained = TrainedModel.of(recipe, build_model(recipe).eval())
    trained.model.head.get_parameter("linear.weight").data.mul_(1000)
    trained.model.head.get_parameter("linear.bias" if head == "linear" else "bias").data.normal_()
    images = torch.randint(0, 256, (20, 3, 16, 16), dtype=torch.uint8)
    with torch.no_grad():
        whole, short = (model.model(images).numpy() for model in (trained, shortened(trained, 2)))
    length = np.linalg.norm(whole, axis=1, keepdims=True)
    if head == "linear":  # the other one moves what was clipped
        assert 2 * np.arctanh(length) == pytest.approx(0.5, abs=1e-5)
    features = (2 * np.arctanh(length) * whole / length)[:, :2]
    length = np.linalg.norm(features, axis=1, keepdims=True)
    assert short == pytest.approx(np.tanh(np.minimum(length, 0.5) / 2) * features / length, abs=1e-6)
    fingerprints = {shortened(trained, dims).fingerprint for dims in (1, 2, 3, 4)} | {trained.fingerprint}
    assert len(fingerprints) == 5
