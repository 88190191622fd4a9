"""Features computed once: equal to those computed live, and never those of something else."""

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import load_file

from dmlkit.backbones.parts import FirstBlocks
from dmlkit.datasets.base import Split
from dmlkit.datasets.files.dataset import PickedSamples
from dmlkit.datasets.folder import FolderConfig
from dmlkit.distributed.launch import start_ranks
from dmlkit.loading.inputs import TransformedImages
from dmlkit.model import EmbeddingModel
from dmlkit.run_folder.folder import RunFolder
from dmlkit.training import data
from dmlkit.transforms.presets import ImageNetConfig
from dmlkit.vectors import features, fill, store
from dmlkit.vectors.fill import FillJob
from dmlkit.vectors.in_memory import embed_images
from dmlkit.vectors.manifest import StoredModel
from dmlkit.vectors.stored import split_embeddings
from dmlkit.vectors.trained import load_model
from tests.conftest import END, Cli, Result
from tests.processes import Forked, command_line, wait_until

RECIPE = """\
seed: 3
dataset: {name: folder, root: photos, validation_fraction: 0.34}
transform: {name: plain, size: 16}
backbone: {name: small_cnn, width: 4, tuning: {name: none}}
embedding_dim: 8
loss: {name: proxy_anchor}
sampler: {name: random, batch_size: 8}
training: {epochs: 3, workers: 0}
metrics: [recall@1, map@r]
"""


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Photos of 12 classes in the working folder, with a recipe."""
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)
    for label in range(12):
        folder = tmp_path / "photos" / f"class{label:02}"
        folder.mkdir(parents=True)
        for number in range(5):
            pixels = random.integers(0, 200, (20, 20, 3)) + 4 * label
            Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number}.png")
    (tmp_path / "r.yaml").write_text(RECIPE)
    return tmp_path / "photos"


Train = Callable[..., Result]


@pytest.fixture
def train(photos: Path, dmlkit: Cli) -> Train:
    """Train a run with changes of the recipe, each ``key=value``, or options, each ``--option``."""

    def run(output: str, *changes: str) -> Result:
        words = (word for text in changes for word in ((text,) if text.startswith("--") else ("--set", text)))
        return dmlkit("train", "r.yaml", "-o", output, *words)

    return run


def weights_of(run: str) -> dict[str, torch.Tensor]:
    state = torch.load(RunFolder(Path(run)).checkpoint_path("last"), weights_only=True)
    return {**state["model"], **state["objective"]}


def same_weights(run: str, other: str) -> bool:
    ours, theirs = weights_of(run), weights_of(other)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


BLOCKS = "backbone.tuning={name: last_blocks, blocks: 2"
VIT = (
    "backbone={name: timm, model: test_vit, image_size: 32}",
    "transform.size=32",
    "training.gradient_checkpointing=true",
)


@pytest.mark.parametrize(
    ("stored", "live"),
    [
        (["backbone.tuning={name: none}"], ["backbone.tuning={name: none, features: live}"]),
        *(
            ([f"{BLOCKS}, feature_views: 0}}", *changes], [f"{BLOCKS}}}", *changes])
            for changes in (
                ["backbone.freeze_epochs=1", "training.gradient_cache=3"],
                ["training.ema=0.9", "optimizer.layer_decay=0.5"],
                VIT,
            )
        ),
    ],
)
def test_training_on_stored_features_equals_training_on_live_ones(stored, live, train):
    """To the bit: plain does not augment, and all images are seen in batches of other sizes and neighbours."""
    train("cached", *stored).ok(), train("live", *live).ok()
    assert same_weights("cached", "live")
    ours, theirs = (RunFolder(Path(run)).read_metrics() for run in ("cached", "live"))
    assert ours[-1].validation == pytest.approx(theirs[-1].validation, abs=1e-6) and ours[0].loss == theirs[0].loss


@pytest.mark.parametrize("sides", ["size: 16, resize: 18", "size: 24, resize: 24, training_size: 16"])
def test_maps_of_views_are_kept_in_half_precision(sides, train, dmlkit, monkeypatch):
    """2 channels a pixel of 4 x 4 after two poolings, times the width; the weights differ by its rounding alone."""
    changes = (
        f"transform={{name: imagenet, {sides}}}",
        f"{BLOCKS}, feature_views: 3, cache: maps}}",
        "optimizer.name=riemannian_sgd",
    )
    train("half", *changes).ok()
    halves = [one for path in stores("maps") for one in features_of(path) if one.dtype == np.float16]
    assert sum(map(len, halves)) == 3 * 3 * 5 and {one.shape[1] for one in halves} == {2 * 4 * 4 * 4}
    others = [one for path in stores("maps") for one in features_of(path) if one.dtype == np.float32]
    assert sum(map(len, others)) == 3 * 5 + 6 * 5  # validation and test images, whose figures are exact
    assert {one.shape[1] for one in others} == {2 * 4 * (6 * 6 if "24" in sides else 4 * 4)}
    monkeypatch.setattr(features, "MAPS", torch.float32)
    train("whole", *changes).ok()
    trained, expected = weights_of("half"), weights_of("whole")
    assert not same_weights("half", "whole")
    assert all(torch.allclose(trained[name], expected[name], atol=2e-3) for name in expected)
    figures = dmlkit("eval", "half", "--checkpoint", "last", "--json").json()["metrics"]
    assert figures == json.loads(Path("half/summary.json").read_text())["last"]["test"]


def test_maps_beyond_half_precision_are_refused(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = FirstBlocks.forward
    monkeypatch.setattr(FirstBlocks, "forward", lambda self, images: 1e6 * forward(self, images))
    monkeypatch.setattr(FirstBlocks, "check", lambda _: None)
    changes = ("transform={name: imagenet, size: 16, resize: 18}", f"{BLOCKS}, feature_views: 1}}")
    train("run", *changes).refused("its features exceed 65,504; train without backbone.tuning.feature_views")


@pytest.mark.parametrize("tuning", ["backbone.tuning={name: none}", f"{BLOCKS}, feature_views: 0}}"])
def test_a_disk_without_room_is_one_line_before_anything_is_written(tuning, photos, train, monkeypatch):
    free = shutil.disk_usage(photos)
    monkeypatch.setattr(data.shutil, "disk_usage", lambda _: free._replace(free=1000))
    width = 16 if "none" in tuning else 2 * 4 * 4 * 4
    needed = 12 * 5 * width * 4
    for dry in ((), ("--dry-run",)):
        said = f"the stored features take {needed / 1e9:.3g} GB, but the disk of "
        train("run", tuning, *dry).refused(said, "has 1e-06 GB free")
        assert not Path("run").exists()
    monkeypatch.setattr(data.shutil, "disk_usage", lambda _: free)
    shown = train("run", tuning, "--dry-run")
    until = "" if "none" in tuning else " until training ends"
    assert f"on disk:    {needed / 1e6:.3g} MB of stored features{until}\n" in shown.out and not Path("run").exists()
    cache = tuning.replace("}", ", cache: cache}")
    train("run", cache).ok()
    monkeypatch.setattr(data.shutil, "disk_usage", lambda _: free._replace(free=0))
    train("other", cache).ok()  # what is there takes no room


def test_blocks_that_read_several_maps_are_refused(train: Train) -> None:
    changes = ("backbone={name: bn_inception, tuning: {name: last_blocks, feature_views: 0}}", "transform.size=64")
    said = "backbone.tuning.feature_views: the last blocks of this backbone read more than one map"
    train("run", *changes).refused(said)
    assert not Path("run").exists()


def test_views_are_the_training_transforms_and_each_draw_takes_one(train: Train) -> None:
    transform = ImageNetConfig(size=16, resize=18)
    dataset = FolderConfig(root="photos", validation_fraction=0).build("train")
    rows = torch.arange(len(dataset)).repeat_interleave(3)
    every = PickedSamples(dataset, rows, dataset.labels[rows])
    model = StoredModel(saved="", fingerprint="", description={"dim": 4}, software={}, device="cpu")
    job = FillJob(every, np.zeros((len(every), 24)), Path(), model, missing=np.arange(len(every)), augments=True)
    draws = [draw for number in job.numbers() for batch in job.batches(number) for draw in batch]
    views = TransformedImages(every, transform, training=True)
    plain = TransformedImages(dataset, transform, training=True)
    for index in (0, 7):
        shown = [views[draws[3 * index + view]] for view in range(3)]
        seeds = [int(np.random.default_rng(3 * index + view).integers(2**62)) for view in range(3)]
        for item, seed in zip(shown, seeds, strict=True):
            assert torch.equal(item.input, plain[index, seed].input)  # pyright: ignore[reportArgumentType]
            assert item.label == int(dataset.labels[index])
        assert not torch.equal(shown[0].input, shown[1].input)  # pyright: ignore[reportArgumentType]
    train("views", "transform={name: imagenet, size: 16, resize: 18}", "backbone.tuning.feature_views=3").ok()
    numbers = [sum(map(len, features_of(path))) for path in stores("views")]
    assert sorted(numbers) == [3 * 3 * 5 + 3 * 5 + 6 * 5]  # 3 of the 6 training classes validate
    every_view = np.concatenate(features_of(*stores("views")))
    assert len(np.unique(every_view, axis=0)) == len(every_view)


def stores(run: str) -> list[Path]:
    """The stores of a run's features, or of a shared cache: one for each backbone, preprocessing and engine."""
    folder = Path(run)
    return sorted(path.parent for path in folder.rglob("model.json") if "vectors" not in path.parts)


def features_of(store: Path) -> list[np.ndarray]:
    return [load_file(path)["points"] for path in sorted(store.glob("*.safetensors"))]


CHANGES = {
    "optimizer.lr=0.01": 12 * 5,
    "dataset.validation_fraction=0.2": 6 * 5,  # other batches of the others
    "backbone.tuning.feature_views=2": 3 * 5 + 6 * 5,  # validation and test images have no views
    "seed=4": 0,  # other weights
    "transform={name: plain, size: 16}": 0,
}
"""How many of the 60 features a change keeps."""


def test_features_of_something_else_are_computed_and_those_of_the_same_are_read(photos, train, monkeypatch) -> None:
    augmented = "transform={name: imagenet, size: 16, resize: 16}"  # else there are no views
    cache = ("backbone.tuning.cache=cache", augmented)
    train("one", *cache).ok()
    write, computed = fill.write_part, list[int]()
    monkeypatch.setattr(fill, "write_part", lambda *own: (computed.append(len(own[1])), write(*own)))

    def check(change: str, kept: int) -> None:
        """Train with and without the cache."""
        cached, alone = (f"{name}-{len(list(Path().glob('alone-*')))}" for name in ("cached", "alone"))
        before = {path: path.read_bytes() for path in Path("cache").rglob("*.*")}
        computed.clear()
        train(cached, *cache, change).ok()
        assert sum(computed) == 12 * 5 - kept + 3 * 5 * ("views" in change), change
        assert before.items() <= {path: path.read_bytes() for path in Path("cache").rglob("*.*")}.items()
        train(alone, augmented, change).ok()
        assert same_weights(cached, alone), change

    for change, kept in CHANGES.items():
        check(change, kept)
    shutil.copy(photos / "class00" / "1.png", photos / "class00" / "0.png")
    check("optimizer.lr=0.02", 12 * 5 - 3 * 5)  # all in the batch of the photo


@pytest.mark.parametrize("way_on", ["removed", "repaired"])
def test_a_photo_that_stops_the_features_is_removed_or_repaired(photos: Path, train: Train, way_on: str) -> None:
    bad = photos / "class02" / "0.png"
    good = bad.read_bytes()
    bad.write_text("not an image")
    train("run").refused("0.png: cannot read this image")
    bad.unlink() if way_on == "removed" else bad.write_bytes(good)
    train("run", "--resume").ok(), train("whole").ok()
    assert same_weights("run", "whole")


def train_slowly(run: str) -> None:
    """Train; each image is one part, and a while passes between parts."""
    store.BATCH_IMAGES = fill.BATCH_IMAGES = fill.PART_IMAGES = 1
    write = fill.write_part

    def slow(*arguments: Any) -> None:
        write(*arguments)
        time.sleep(0.05)

    fill.write_part = slow
    command_line("train", "r.yaml", "-o", run, "--resume")


@pytest.mark.heavy
@pytest.mark.parametrize("tuning", ["{name: none}", "{name: last_blocks, blocks: 2, feature_views: 0}"])
def test_a_kill_while_features_are_computed_costs_no_part(tuning: str, train: Train) -> None:
    """A kill falls between parts, and the same weights come out."""
    Path("r.yaml").write_text(RECIPE.replace("{name: none}", tuning))
    process = Forked(train_slowly, "killed")
    wait_until(lambda: len(list(Path("killed/features").rglob("*.safetensors"))) >= 5, process)
    process.kill()
    process.communicate()
    assert 5 <= len(list(Path("killed/features").rglob("*.safetensors"))) < 12 * 5
    again = Forked(train_slowly, "killed")
    assert again.wait(END) == 0, again.communicate()[0]
    train("whole").ok()
    killed, whole = weights_of("killed"), weights_of("whole")
    assert all(torch.allclose(killed[name], whole[name], atol=1e-6) for name in whole)


@pytest.mark.parametrize("tuning", ["{name: none}", "{name: last_blocks, blocks: 2, feature_views: 0}"])
def test_stored_features_give_the_embeddings_of_their_images(tuning, photos, train, dmlkit, monkeypatch):
    """To the bit, without the frozen layers; not if a photo has changed, or by other software."""
    Path("r.yaml").write_text(RECIPE.replace("{name: none}", tuning.replace("0}", "0, cache: maps}")))
    train("run").ok()
    dimensions, forward = list[int](), EmbeddingModel.forward

    def noted(self: EmbeddingModel, inputs: torch.Tensor) -> torch.Tensor:
        dimensions.append(inputs.ndim)
        return forward(self, inputs)

    monkeypatch.setattr(EmbeddingModel, "forward", noted)
    ranks, run = start_ranks("cpu"), RunFolder(Path("run"))
    trained = load_model(run, ranks)

    def computed(split: Split) -> set[int]:
        """Numbers of dimensions of what the model was given: 4 for images, 2 for features."""
        dataset = trained.recipe.dataset.build(split)
        expected = embed_images(trained, ranks, dataset, "photos")
        dimensions.clear()
        embedded = split_embeddings(run, trained, ranks, dataset, split)
        assert all(torch.equal(one, other) for one, other in zip(embedded[:3], expected[:3], strict=True))
        return {*dimensions}

    assert computed("test") == computed("validation") == computed("train") == {2}  # plain draws no views
    dimensions.clear()
    assert dmlkit("plot", "histogram", "run").code == 0 and {*dimensions} == {2}
    shutil.rmtree("run/vectors")
    assert computed("validation") == {2}
    with monkeypatch.context() as patch:
        patch.setattr(store, "version", lambda package: f"1.0 of {package}")
        assert computed("validation") == {4}
    shutil.copy(photos / "class11" / "1.png", photos / "class11" / "0.png")
    assert computed("test") == {4}


def test_an_engine_computes_the_points_that_it_names(photos, train, monkeypatch):
    """From the images, although training has stored features, which are torch's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(photos.parent / "cache"))
    train("run", "--device=cpu").ok()
    ranks, run = start_ranks("cpu+bf16"), RunFolder(Path("run"))
    trained = load_model(run, ranks)
    dataset = trained.recipe.dataset.build("test")
    stored = split_embeddings(run, trained, ranks, dataset, "test")
    assert torch.equal(stored.points, embed_images(trained, ranks, dataset, "photos").points)


@pytest.mark.parametrize(("engine", "tolerance"), [("onnxruntime", 1e-5), ("bf16", 0.05)])
def test_an_engine_computes_the_features_of_training_images_alone(engine, tolerance, photos, train, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(photos.parent / "cache"))
    train("torch", "--device=cpu").ok()
    train("fast", "--device=cpu", f"backbone.tuning.engine={engine}").ok()
    devices = {json.loads((path / "model.json").read_text())["device"]: path for path in stores("fast")}
    assert sorted(devices) == ["cpu", f"cpu+{engine}"]
    (ours,), (theirs,) = ([features_of(path) for path in paths] for paths in (stores("torch"), [devices["cpu"]]))
    assert {one.tobytes() for one in theirs} < {one.tobytes() for one in ours}  # figures are torch's
    (of_engine,) = features_of(devices[f"cpu+{engine}"])
    (of_torch,) = (one for one in ours if one.tobytes() not in {other.tobytes() for other in theirs})
    assert not np.array_equal(of_engine, of_torch)
    np.testing.assert_allclose(of_engine, of_torch, rtol=tolerance, atol=tolerance)
