"""The first recipe: what start finds out before it, and that it is never written over what a user put into it."""

import os
import shlex
from errno import EROFS
from pathlib import Path
from typing import Any

import pytest

from dmlkit.recipe.file import read_recipe
from dmlkit.training import estimate
from tests.conftest import Cli, Result
from tests.datasets import trees


@pytest.fixture(autouse=True)
def is_quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an empty folder, with a made-up speed of the network, whose measurement took 2 s a test.

    tests/cli/test_screens.py has a real one.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("os.getloadavg", lambda: (0.0, 9.0, 9.0), raising=False)
    monkeypatch.setattr(estimate, "free_memory", lambda _: 1e12)
    monkeypatch.setattr(estimate, "_computing", lambda *_, **__: 1e-3)


@pytest.fixture
def birds() -> Path:
    """Photos of 4 classes, in the current folder."""
    return trees.photos(Path("birds"), (f"class_{number % 4}/{number}.png" for number in range(12)))


def test_an_existing_recipe_is_replaced_only_by_its_name(dmlkit, birds: Path):
    assert dmlkit("start", birds, "--quick").code == 0
    path = Path("birds.yaml")
    assert read_recipe(path).dataset.name == "folder" and "trains on 6 photos of 2 classes" in path.read_text()
    path.write_text("# my notes\n")
    dmlkit("start", birds, "--quick").refused("birds.yaml: exists already; choose another name with -o, or")
    assert path.read_text() == "# my notes\n"
    for label in range(4):
        trees.photo(birds / f"class_{label}" / "more.png", 20 + label)
    assert dmlkit("start", birds, "-o", path, "--quick").code == 0
    assert "trains on 8 photos of 2 classes" in path.read_text()
    result = dmlkit("start", birds, "-o", "my other.yaml", "--quick")
    following = next(line for line in result.out.splitlines() if line.startswith("next: "))
    assert shlex.split(following)[1:] == ["dmlkit", "train", "my other.yaml", "-o", "runs/my other"]


def test_the_recipe_is_written_though_what_reads_the_output_has_ended(
    dmlkit: Cli, birds: Path, monkeypatch: pytest.MonkeyPatch
):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        monkeypatch.setattr("sys.stdout", stream)
        assert dmlkit("start", birds, "--quick").code == 1
    assert read_recipe(Path("birds.yaml")).dataset.name == "folder"


def start_and_train(dmlkit: Cli, folder: str) -> tuple[Result, Result]:
    started = dmlkit("start", folder, "-o", "recipe.yaml", "--device", "cpu").ok()
    quick = ["backbone={name: small_cnn, width: 4}", "transform={name: plain, size: 16}"]
    options = [word for change in (*quick, "training.epochs=1", "training.workers=0") for word in ("--set", change)]
    return started, dmlkit("train", "recipe.yaml", "-o", "run", "--device", "cpu", *options)


@pytest.mark.parametrize("count", [4, 8])
def test_train_takes_the_recipe_of_few_classes(count: int, dmlkit: Cli):
    trees.birds(Path("photos"), [f"class_{number}" for number in range(count)], 3)
    started, trained = start_and_train(dmlkit, "photos")
    assert trained.code == 0, trained.err
    assert ("no validation: too few training classes" in started.out) == (count < 8)
    assert (read_recipe(Path("recipe.yaml")).dataset.validation_fraction == 0) == (count < 8)
    assert Path("run/checkpoints/best.pt").exists() == (count == 8)


def test_all_faulty_classes_are_named_at_once(dmlkit: Cli):
    for label in range(50):
        for number in range(2):
            name = os.fsencode(f"{number}") + (b"\xf6" if label % 2 and number else b"") + b".png"  # not UTF-8
            photo = trees.photo(Path("birds") / f"class_{label:02}" / f"{number}.jpg", 2 * label + number)
            photo.rename(photo.with_name(os.fsdecode(name)))
    result = dmlkit("start", "birds", "--device", "cpu")
    assert result.code == 2 and not Path("birds.yaml").exists()
    (line,) = result.err.splitlines()
    assert "class_01" in line and "this name is not UTF-8; rename the file or folder; 24 more of this kind: " in line
    assert all(f"class_{label:02}" in line for label in range(3, 10, 2)) and "class_11" not in line
    assert line.endswith(" and 20 more; run dmlkit data check --all to list all")
    every = dmlkit("data", "check", "birds", "--all").out.splitlines()
    assert sum(line.startswith("error: ") and "this name is not UTF-8" in line for line in every) == 25


def test_known_individuals_in_other_photos_are_divided_by_class(dmlkit: Cli):
    """The same classes in train/ and test/, as for a classifier: what the screen says, and a recipe that trains."""
    for split in ("train", "test"):
        trees.birds(Path("photos", split), [f"class_{number}" for number in range(8)], 3)
    started, trained = start_and_train(dmlkit, "photos")
    assert "photos: 8 classes are in several splits (class_0, " in " ".join(started.out.split())
    assert "split: images" in Path("recipe.yaml").read_text()
    assert trained.code == 0, trained.err


def test_a_class_of_a_single_photo_stops_nothing(dmlkit: Cli, caplog):
    trees.birds(Path("photos"), [f"class_{number}" for number in range(8)], 3)
    trees.birds(Path("photos"), ["alone", "solo"], 1)
    started, trained = start_and_train(dmlkit, "photos")
    said = (
        "photos: 1 of 3 training classes have a single image, which has no positive: alone",
        "photos: 1 of 5 test classes have no second image to find, so theirs are searched but are no queries: solo",
    )
    for line in said:
        assert line in " ".join(started.out.split()) and line in caplog.text
    assert trained.code == 0, trained.err
    assert "12 queries" in dmlkit("eval", "run").out  # of the other four test classes


def test_labels_that_look_like_several_are_named(dmlkit: Cli):
    trees.birds(Path("photos"), "abcd", 3)
    files = sorted(Path("photos").rglob("*.jpg"))
    advice = 'write separator: "|" below dataset'
    for joint, names in (("|", True), ("-", False)):
        rows = [f"{file},{file.parent.name}{joint}all" for file in files]
        Path("photos.csv").write_text("\n".join(["path,label", *rows]))
        result = dmlkit("start", "photos.csv", "-o", "r.yaml", "--quick")
        assert result.code == 0 and (advice in " ".join(result.out.split())) == names, result.out


def test_the_screen_names_what_is_left_out_within_80_columns(dmlkit: Cli, caplog):
    names = [f"{number:02} a kind of crow with a long name" for number in range(20)] + ["99 \x1b]0;title\x07"]
    trees.birds(Path("photos"), names, 2)
    trees.photo(Path("photos/top.jpg"), 500)
    Path("photos/notes.txt").write_text("x")
    (Path("photos") / names[0] / "broken.jpg").write_bytes(b"")
    result = dmlkit("start", "photos", "-o", "recipe.yaml", "--device", "cpu").ok()
    lines = result.out.splitlines()
    assert max(len(line) for line in lines if "broken.jpg" not in line) <= 80 and "\x1b" not in result.out
    said, crow = " ".join(result.out.split()), "a kind of crow with a long name"
    assert f"not trained on: 3 validation classes: 07 {crow}, 08 {crow}, 09 {crow} not" in said
    assert f"not trained on: 11 test classes: 10 {crow}, 11 {crow}" in said and f"14 {crow} and 6 more" in said
    assert f"cannot be opened: 1 of 43 images: photos/{names[0]}/broken.jpg" in said
    rows = [line.strip("│ ").replace(" ", "").split("│") for line in lines if line.startswith("│")]
    assert rows[:3] == [["train", "15", "7"], ["validation", "6", "3"], ["test", "22", "11"]]
    assert "trains on 15 photos of 7 classes" in Path("recipe.yaml").read_text()
    assert any(line.startswith("training takes ") and line.endswith("images/s)") for line in lines)
    assert "photos: 2 files are left out: 1 in no class folder, e.g. top.jpg; 1 .txt, e.g. notes.txt" in caplog.messages


TUNINGS = ("none, feature_views: 4", "none", "full", "last_blocks", "last_blocks, feature_views: 4")


@pytest.mark.parametrize("tuning", TUNINGS)
def test_the_estimate_counts_the_passes_through_the_backbone(tuning: str, tiny_recipe: Path, monkeypatch):
    """With one second per image or map. Of the classes, 3 are trained, 3 validate and 6 test; each has 6 images."""
    monkeypatch.setattr(estimate, "_per_image", lambda *_: 1.0)
    changes = [f"backbone.tuning={{name: {tuning}}}", "transform={name: hyp_vit, size: 16, resize: 20}"]
    estimated = estimate.estimate_training(read_recipe(tiny_recipe, changes), "cpu")
    train, validation, test, epochs = 3 * 6, 3 * 6, 6 * 6, 3
    seconds = epochs * train + (epochs + 1) * validation + 2 * test
    storing = train * (4 if "4" in tuning else 1) + validation + test
    if "none" in tuning:
        seconds = storing + epochs * estimate.EPOCH
    elif "4" in tuning:
        seconds += storing
    assert estimated.seconds == pytest.approx(seconds) and estimated.images_per_second == 1
    maps = "last_blocks, feature" in tuning
    numbers = 16 * 4 * 4  # of the map before the last convolution: four times the width, after two poolings
    assert estimated.disk == (numbers * (2 * 4 * train + 4 * (validation + test)) if maps else 0)


@pytest.mark.parametrize(
    ("budget", "tuning", "epochs", "lines"),
    [
        ("20m", "full", 200, ["training takes about 20 min"]),  # twice the fewest epochs, which take 10 minutes
        ("600s", "full", 100, ["training takes about 10 min"]),
        ("9m", "last_blocks", 108, ["training takes about 9 min", "all weights would take 10 min and give more"]),
        ("5m", "stored_maps", 150, ["training takes about 5 min", "all weights would take 10 min and give more"]),
        ("1m", "none", 200, ["training takes about 1 min", "all weights would take 10 min and give more"]),
        ("4m50s", "none", 200, ["the last 2 blocks on stored maps would take 1e+06 GB of this disk, which has less"]),
        ("12s", "none", 200, ["nothing here takes less; timm:tf_efficientnet_lite0 in place of a run needs"]),
    ],
)
def test_the_budget_chooses_how_much_is_trained(budget: str, tuning: str, epochs, lines, dmlkit, birds, monkeypatch):
    """With made-up times of the fewest epochs: 10 minutes for all weights, 8 1/3 for the last blocks, 1 for a head.

    On stored maps 100 epochs take 2 minutes after 2 minutes of storing; Lite0 has no attention layers for LoRA.
    """
    seconds, own = {"full": 600.0, "last_blocks": 500.0, "none": 60.0}, estimate.estimate_training
    monkeypatch.setattr(estimate, "MOST_TUNING_EPOCHS", 200)

    def made_up(recipe: Any, *words: Any, **options: Any) -> estimate.Estimate:
        used = recipe.backbone.tuning
        if used.name == "lora":
            return own(recipe, *words, **options)
        if used.name == "last_blocks" and used.feature_views is not None:
            return estimate.Estimate(240.0, 1.0, storing=120.0, disk=1e15 if budget == "4m50s" else 1e6)
        return estimate.Estimate(seconds[used.name], 1.0)

    monkeypatch.setattr(estimate, "estimate_training", made_up)
    monkeypatch.setattr("os.getloadavg", lambda: (7.5, 0.0, 0.0) if budget == "20m" else (0.0, 9.0, 9.0))
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    result = dmlkit("start", birds, "--budget", budget, "--device", "cpu")
    said = " ".join(result.out.split())
    assert result.code == 0 and all(line in said for line in lines), said
    assert ("less while no other program uses it (load 7.5 on 8 cores)" in said) == (budget == "20m")
    recipe = read_recipe(Path("birds.yaml"))
    name = tuning.replace("stored_maps", "last_blocks")
    assert (recipe.backbone.tuning.name, recipe.training.epochs) == (name, epochs)
    assert getattr(recipe.backbone.tuning, "feature_views", None) == {"stored_maps": 8, "none": 4}.get(tuning)
    assert (recipe.transform.size, recipe.transform.resizing.side) == ((224, 256) if tuning == "none" else (160, 160))


def test_the_screen_says_which_of_nested_folders_are_the_classes(dmlkit: Cli):
    """Also where the outermost are too few to train, so that nobody takes the error for a fault of the photos."""
    for genus in ("crow", "gull"):
        for species in ("first", "second"):
            trees.photo(Path("photos") / genus / species / "1.jpg", 1)
    said = " ".join(dmlkit("start", "photos").refused("has 2 classes").out.split())
    assert "e.g. photos/crow/first, and the outermost are the classes; for the innermost, write levels: [level1" in said
    assert not Path("photos.yaml").exists()


def test_the_recipe_has_the_whole_name_of_the_folder(dmlkit: Cli):
    trees.birds(Path("my photos.v2"), "abcd", 3)
    assert dmlkit("start", "my photos.v2/", "--quick").ok() and Path("my photos.v2.yaml").exists()
    dmlkit("start", "my photos.v2/", "--quick").refused("or replace it with -o 'my photos.v2.yaml'")


def test_a_folder_with_test_but_without_train_is_told(dmlkit: Cli):
    trees.birds(Path("photos/test"), "abcd", 3)
    refused = dmlkit("start", "photos").refused("photos has a folder 'test' but no folder 'train'; add it")
    assert "nested" not in refused.out


def test_a_folder_whose_own_name_is_not_utf_8_is_told(dmlkit: Cli):
    folder = trees.birds(Path(os.fsdecode(b"m\xf6we")), "abcd", 3)
    dmlkit("start", folder).refused("this name is not UTF-8; rename the file or folder")


def test_a_column_that_is_named_twice_is_refused(dmlkit: Cli, birds: Path):
    Path("t.csv").write_text("path,a,b\nbirds/class_0/0.png,x,y\n")
    twice = ("--column", "label=a", "--column", "label=b")
    dmlkit("start", "t.csv", *twice).refused("--column label: given twice, but takes one column; give it once")


def test_the_default_recipe_is_not_written_among_the_photos(dmlkit: Cli, birds: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(birds)
    dmlkit("start", ".", "--quick").refused("birds.yaml: this is inside .", "choose a path outside that folder")
    assert not Path("birds.yaml").exists()


def test_a_folder_that_cannot_be_written_is_refused_before_measuring(dmlkit: Cli, birds: Path, monkeypatch):
    def read_only(dir: Path) -> None:  # noqa: A002 - as tempfile names it
        raise OSError(EROFS, "Read-only file system", str(dir / "tmp"))

    monkeypatch.setattr("dmlkit.files.outputs.TemporaryFile", read_only)
    monkeypatch.setattr("dmlkit.training.start.start", lambda *_, **__: pytest.fail("measures"))
    for options in ((), ("-o", "new/recipe.yaml")):
        dmlkit("start", birds, *options).refused(f"{Path.cwd()}: cannot write into this folder: Read-only file system")
    assert not Path("new").exists()
