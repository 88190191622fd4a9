"""A run with known classes in its test: figures by nearest neighbors of another library, and every command on it."""

import json
from pathlib import Path

import numpy as np
import pytest
from pyarrow import parquet
from sklearn.neighbors import KNeighborsClassifier

from dmlkit.files import exif
from dmlkit.run_folder.folder import RunFolder
from tests.conftest import ONE_EPOCH, Cli
from tests.datasets import trees
from tests.files.test_exif import ORIGINAL, photo

CLASSES = [f"c{number}" for number in range(8)]
METRICS = "metrics: [{name: recall, k: [1]}, {name: map_at_r}, map]\n"


def photos(root: Path) -> None:
    """Six training and two test photos of each class; of the last class a single one, which is for training."""
    for number, name in enumerate(CLASSES):
        for split, count in (("train", 6), ("test", 2)) if name != CLASSES[-1] else (("train", 1),):
            for index in range(count):
                trees.photo(root / split / name / f"{index}.jpg", 100 * number + 10 * (split == "test") + index)


def recipe(dataset: str) -> None:
    text = ONE_EPOCH.replace(ONE_EPOCH.splitlines()[1], f"dataset: {{{dataset}}}").partition("metrics:")[0]
    Path("recipe.yaml").write_text(text + METRICS)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dmlkit: Cli) -> Path:
    monkeypatch.chdir(tmp_path)
    photos(Path("photos"))
    recipe("name: folder, root: photos, split: images, validation_fraction: 0.2")
    dmlkit("train", "recipe.yaml", "-o", "run", "--device", "cpu").ok()
    return Path("run")


def embedded(dmlkit: Cli, split: str) -> tuple[np.ndarray, list[str]]:
    assert dmlkit("embed", "run", "--split", split, "-o", split, "--device", "cpu").code == 0
    labels = parquet.read_table(Path(split, "items.parquet"))["label"].to_pylist()
    return np.load(Path(split, "embeddings.npy")), labels


def test_test_images_are_searched_in_the_training_images_as_by_another_library(run: Path, dmlkit: Cli):
    parts = {split: embedded(dmlkit, split) for split in ("train", "validation", "test")}
    assert [len(labels) for _, labels in parts.values()] == [43 - 8, 8, 14]
    gallery = [np.concatenate([parts[split][0] for split in ("train", "validation")])]
    names = np.array([*parts["train"][1], *parts["validation"][1]])
    points, labels = parts["test"]
    nearest = KNeighborsClassifier(1, metric="cosine").fit(gallery[0], names)
    recall = float((nearest.predict(points) == np.array(labels)).mean())
    precisions: dict[float, list[float]] = {-1e-6: [], 1e-6: []}  # near ties in both orders
    for point, label in zip(points.astype(float), labels, strict=True):
        for shift, found in precisions.items():
            is_right = names == label
            right = is_right[np.argsort(-(gallery[0] @ point + shift * is_right), kind="stable")]
            found.append(float(np.mean(np.cumsum(right)[right] / (1 + np.flatnonzero(right)))))
    shown = dmlkit("eval", run, "--json", "--device", "cpu").json()
    assert shown["queries"] == 14 and shown["classes"] == 7
    assert shown["metrics"]["recall@1"] == pytest.approx(recall, abs=1e-9)
    least, most = (float(np.mean(found)) for found in precisions.values())
    assert least - 1e-6 <= shown["metrics"]["map"] <= most + 1e-6 and most - least < 0.01
    note = "known classes: 14 test images search 43 others; these metrics do not measure unseen classes"
    assert note in shown["notes"]
    summary = json.loads(Path("run/summary.json").read_text())
    assert summary["best"]["test"]["recall@1"] == pytest.approx(recall, abs=1e-9)
    validated = dmlkit("eval", run, "--split", "validation", "--json", "--device", "cpu").json()
    assert validated["queries"] == 8
    assert summary["best"]["validation"]["map"] == pytest.approx(validated["metrics"]["map"], abs=1e-6)


COMMANDS = (
    "eval run --by photos.csv:camera",
    "eval run --checkpoint pretrained",
    "eval run --evidence center",
    "eval run photos --split test",
    "embed run --split test -o embeddings",
    "search run photos/test/c4/0.jpg",
    "cluster run -k 4",
    "duplicates run",
    "inspect run -o page.html",
    "plot heatmap run -o heatmap.png",
    "plot histogram run -o histogram.png",
    "plot retrieval run -o retrieval.png",
    "export run --format hub -o hub",
    "final run -o final",
    "gallery create run photos/train -o gallery",
    "calibrate gallery",
    "data check recipe.yaml",
)


def test_every_command_on_the_run(run: Path, dmlkit: Cli):
    rows = [f"{path},{path.stem}" for path in sorted(Path("photos").rglob("*.jpg"))]
    Path("photos.csv").write_text("\n".join(["path,camera", *rows]))
    wrong = []
    for command in COMMANDS:
        shown = dmlkit(*command.split())
        if shown.code:
            wrong.append((command, shown.code, shown.err))
    assert not wrong, wrong
    card = Path("hub/README.md").read_text()
    assert "14 queries of 7 classes that were trained on; the gallery has the training images" in card
    for command in ("calibrate run", "verify run photos/test/c0/0.jpg photos/test/c0/1.jpg"):
        dmlkit(*command.split()).refused("dataset.split images trains on every class; create a gallery")
    dmlkit("eval", "run", "--set", "dataset.split=official").refused(
        "got official, but run was trained to test known classes"
    )
    figures = dmlkit("eval", "run", "photos", "--split", "test", "--json", "--device", "cpu").json()
    assert figures["queries"] == 14 and figures["metrics"] == dmlkit("eval", "run", "--json").json()["metrics"]


def test_a_run_by_time_keeps_to_its_images_and_reads_no_headers_again(tmp_path, monkeypatch, dmlkit):
    monkeypatch.chdir(tmp_path)

    def add(label: str, number: int, day: int) -> None:
        photo(Path("photos", label, f"{number}.jpg"), {ORIGINAL: f"2026:05:{day:02} 12:00:00"}, seed=number + day)

    for label in CLASSES[:6]:
        for number in range(6):
            add(label, number, 10 + number)
    recipe("name: folder, root: photos, split: {time: 0.8}, validation_fraction: 0.2")
    assert dmlkit("train", "recipe.yaml", "-o", "run", "--device", "cpu").code == 0
    kept = RunFolder(Path("run")).classes()
    assert kept is not None and kept.images is not None
    assert [len(names) for names in kept.images.values()] == [24, 6, 6]
    before = dmlkit("eval", "run", "--json")
    for label in CLASSES[:6]:
        for number in range(6, 20):  # older ones: the rule alone would now test images that were trained on
            add(label, number, 1)
    with monkeypatch.context() as patch:
        patch.setattr(exif, "_sighting", lambda _: pytest.fail("a header was read"))
        after = dmlkit("eval", "run", "--json")
    assert json.loads(before.out)["metrics"] == json.loads(after.out)["metrics"]
    assert "84 images are in no split of run, new or without a time, and left out" in after.err
    refused = dmlkit("eval", "run", "--by", "time")
    assert refused.code == 2 and "\nerror: --by time: the only value is '2026-05-15'" in refused.err
