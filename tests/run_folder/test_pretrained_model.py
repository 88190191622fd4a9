"""A pretrained model by its name, wherever a command takes a run; against timm's own network and preprocessing."""

import json
import shutil
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.functional import normalize

from dmlkit.files.source import IN_TIMM, SIZES, model_name
from tests.conftest import Cli
from tests.datasets import trees

timm = pytest.importorskip("timm", reason="the extra dmlkit[timm] is not installed")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    trees.photos(folder / "photos", (f"{label}/{index}.jpg" for label in range(4) for index in range(4)))
    torch.manual_seed(0)
    timm.models.save_for_hf(timm.create_model("test_vit", num_classes=0), str(folder / "vit"))
    return folder


@pytest.fixture
def home(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: 4 classes of 4 photos in ``photos``, and ``vit``, a model with random weights."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def own_features(folder: Path, photos: list[Path]) -> np.ndarray:
    """The unit features of photos by timm alone."""
    network = timm.create_model(f"local-dir:{folder}", pretrained=True, num_classes=0).eval()
    transform = timm.data.create_transform(**timm.data.resolve_data_config({}, model=network))
    pixels = torch.stack([transform(Image.open(photo).convert("RGB")) for photo in photos])
    with torch.inference_mode():
        return normalize(network(pixels)).numpy()


@pytest.mark.parametrize("model", ["vit", "timm:local-dir:vit"])
def test_a_folder_of_timm_embeds_as_timm_does(model: str, home: Path, dmlkit: Cli):
    dmlkit("embed", model, "photos", "--device", "cpu").ok()
    written = np.load(home / "embeddings" / "photos" / "embeddings.npy")
    expected = own_features(home / "vit", sorted((home / "photos").glob("*/*")))
    assert np.sum(written * expected, axis=1).min() > 0.999  # dmlkit resizes tensors, timm Pillow images
    assert dmlkit("search", "embeddings/photos", "photos/0/1.jpg", "-k", 1, "--device", "cpu").code == 0


def test_embeddings_by_another_model_are_not_replaced_by_default(home: Path, dmlkit: Cli):
    shutil.copytree("vit", "other")
    dmlkit("embed", "vit", "photos", "--device", "cpu").ok()
    before = Path("embeddings/photos/manifest.json").read_bytes()
    other = dmlkit("embed", "other", "photos", "--device", "cpu")
    other.refused(f"embeddings/photos: has embeddings of {home}/photos by timm:local-dir:{home}/vit; choose another")
    dmlkit("embed", "vit", "photos", "--device", "cpu").ok()
    assert Path("embeddings/photos/manifest.json").read_bytes() == before
    dmlkit("embed", "other", "photos", "-o", "embeddings/photos", "--device", "cpu").ok()


def test_a_gallery_of_a_model_outlives_the_cache(home: Path, dmlkit: Cli):
    dmlkit("gallery", "create", "vit", "photos", "-o", "birds").ok()
    shutil.rmtree(home / "cache", ignore_errors=True)  # a gallery has stored nothing there, other commands may have
    report = dmlkit("search", "birds", "photos/2/3.jpg", "-k", 1, "--json", "--device", "cpu").json()
    assert report["queries"][0]["neighbors"][0]["label"] == "2"
    assert dmlkit("gallery", "info", "birds", "--json").json()["run"] == f"timm:local-dir:{home / 'vit'}"


def test_a_model_is_evaluated_on_a_folder_and_has_a_folder_in_the_cache(home: Path, dmlkit: Cli):
    """A model has no folder of its own: neither its files nor the current folder gain any."""
    before, name = {*home.rglob("*")}, f"timm:local-dir:{home / 'vit'}"
    shown = dmlkit("eval", name, "photos", "--device", "cpu").ok().out
    kept = home / "cache" / "dmlkit" / "models" / quote(name, safe="")
    (report,) = (kept / "evaluations").glob("*.json")
    assert "".join(f"written to {report}".split()) in "".join(shown.split())
    assert report.with_suffix(".npz").is_file() and not (kept / "recipe.yaml").exists()
    metrics = dmlkit("eval", name, "photos", "--json", "--device", "cpu").json()["metrics"]
    assert json.loads(report.read_text())["metrics"] == metrics
    points = torch.from_numpy(own_features(home / "vit", sorted((home / "photos").glob("*/*"))))
    nearest = (points @ points.T).fill_diagonal_(-1).argmax(dim=1)
    labels = torch.arange(4).repeat_interleave(4)
    assert metrics["recall@1"] == pytest.approx((labels[nearest] == labels).double().mean().item())
    dmlkit("duplicates", "vit", "--set", "dataset.root=photos", "--device", "cpu").ok()
    assert list(kept.glob("vectors/*"))
    assert all(path.is_relative_to(home / "cache") for path in {*home.rglob("*")} - before)


def test_a_model_is_calibrated_and_verifies(home: Path, dmlkit: Cli):
    for label in range(4, 8):  # 2 of 4 training classes validate
        for index in range(4):
            trees.photo(home / "photos" / f"{label}" / f"{index}.jpg", 10 * label + index)
    asked = ("calibrate", "vit", "--set", "dataset.root=photos", "--set", "dataset.split=official", "--device", "cpu")
    done = dmlkit(*asked).ok()
    place = done.out.partition("written to ")[2].split()[0]
    assert Path(place).is_file() and Path(place).is_relative_to(home / "cache"), done.out
    verified = dmlkit("verify", "vit", "photos/0/0.jpg", "photos/0/1.jpg", "--json", "--device", "cpu")
    points = own_features(home / "vit", [home / "photos" / "0" / f"{index}.jpg" for index in (0, 1)])
    (pair,) = json.loads(verified.out)["pairs"]
    assert pair["score"] == pytest.approx(float(points[0] @ points[1]), abs=0.01)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("embed timm:no_such_model photos", "timm:no_such_model: backbone.model: timm has no 'no_such_model'"),
        ("embed timm: photos", "timm:: expected timm:MODEL, e.g. timm:tf_efficientnet_lite0"),
        ("embed vit photos --checkpoint best", "--checkpoint best: timm:local-dir:"),
        ("final vit", "vit: is a pretrained model, which has no recipe to train"),
        ("final timm:test_vit", "timm:test_vit: is a pretrained model, which has no recipe to train"),
        ("cluster vit -k 2", "a pretrained model has no images of its own; name them with --set dataset.root=FOLDER"),
        ("search vit photos", "a pretrained model has no images of its own; run dmlkit embed timm:local-dir:"),
        ("compare vit timm:test_vit", "no images of its own; name them with --set dataset.root=FOLDER"),
        ("export vit --format hub", "/vit has no trained weights; use --format onnx or torch-export"),
        ("export vit --format onnx", "/vit has no folder of its own; name the file with --output"),
        ("export vit --format onnx -o m.onnx", "no images of its own; name them with --set dataset.root=FOLDER"),
        ("calibrate vit --set dataset.root=photos", "all leaves no validation classes; use official"),
        ("embed vit --split test --set dataset.root=photos", "all leaves no test classes; use official"),
        ("verify vit photos/0/0.jpg photos/0/1.jpg", "dataset.root=FOLDER --set dataset.split=official"),
    ],
)
def test_what_a_model_cannot_answer_is_one_line(words: str, expected: str, home: Path, dmlkit: Cli):
    result = dmlkit(*words.split())
    assert result.code and expected in result.err and result.err.count("\n") == 1, result.err


@pytest.mark.parametrize(
    ("command", "files", "expected"),
    [
        (
            "embed",
            {"config.json": {"model_type": "dinov2", "hidden_size": 384, "patch_size": 14}},
            "is a folder of transformers (dinov2), which dmlkit does not read; timm:vit_small_patch14_dinov2.lvd142m",
        ),
        (
            "search",
            {
                "modules.json": [],
                "0_CLIPModel/config.json": {
                    "model_type": "clip",
                    "vision_config": {"hidden_size": 768, "patch_size": 32},
                },
            },
            "sentence-transformers (clip), which dmlkit does not read",
        ),
        ("embed", {"config.json": {"model_type": "bert"}}, "transformers (bert), which dmlkit does not"),
    ],
)
def test_a_folder_of_another_program_names_the_model_of_timm(command, files, expected, home, dmlkit):
    for name, content in files.items():
        (home / "other" / name).parent.mkdir(parents=True, exist_ok=True)
        (home / "other" / name).write_text(json.dumps(content))
    result = dmlkit(command, "other", "photos")
    assert result.code and expected in result.err and result.err.count("\n") == 1, result.err


def test_the_named_models_are_in_timm():
    known = set(timm.list_models(pretrained=True))
    for pattern in IN_TIMM.values():
        names = {pattern.format(size=size, image_size=224) for size in SIZES.values()}
        assert names & known, pattern


def test_a_file_of_that_name_comes_first(home: Path):
    assert model_name(Path("timm:resnet18")) == "timm:resnet18"
    (home / "timm:resnet18").mkdir()
    assert model_name(Path("timm:resnet18")) is None


def test_an_export_says_the_license_of_the_weights(home: Path, dmlkit: Cli):
    words = ("--format", "torch-export", "-o", "model.pt2", "--set", "dataset.root=photos")
    assert "note: pretrained weights: license apache-2.0" in dmlkit("export", "vit", *words).out
