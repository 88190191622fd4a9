"""A run keeps to its own classes, whatever the folder, table or file of its dataset has gained or lost since."""

import json
import shutil
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dmlkit.datasets.base import SPLITS, DatasetConfig, Split
from dmlkit.datasets.files.dataset import Dataset
from dmlkit.datasets.files.listing import Listing
from dmlkit.errors import warn_once
from dmlkit.files.where import Where
from dmlkit.recipe.file import parse_recipe
from dmlkit.run_folder.documents import RunClasses, Summary
from dmlkit.run_folder.folder import RunFolder
from dmlkit.training import train as training
from tests.conftest import ONE_EPOCH, refuses

FIRST = tuple(f"c{number}" for number in range(8))
GROWN = (*(f"a{number}" for number in range(8)), *FIRST)  # eight new classes sort first, and take all of the first half
SPLIT = {name: "train" if place < 3 else "validation" if place < 5 else "test" for place, name in enumerate(FIRST)}


def photo(path: Path, seed: int) -> None:
    if path.exists():  # as it was, with its time
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(path)


def class_folders(names: Iterable[str]) -> str:
    for name in names:
        for index in range(6):
            photo(Path("photos", name, f"{index}.png"), sum(name.encode()) * 10 + index)
    return "name: folder, root: photos"


def split_folders(names: Iterable[str]) -> str:
    for name in names:
        for index in range(6):
            photo(Path("photos", SPLIT.get(name, "test"), name, f"{index}.png"), index)
    return "name: folder, root: photos"


def table(names: Iterable[str]) -> str:
    class_folders(names)
    rows = [f"photos/{name}/{index}.png,{name}" for name in names for index in range(6)]
    Path("photos.csv").write_text("\n".join(["path,label", *rows]))
    return "name: table, file: photos.csv"


def label_sets(names: Iterable[str]) -> str:
    """In a table of several labels per image; each new class shares a label with a class of the run."""
    class_folders(names)
    labels = [(name, f"c{name[1]}|{name}" if name[0] == "a" else name) for name in names]
    rows = [f"photos/{name}/{index}.png,{label}" for name, label in labels for index in range(6)]
    Path("photos.csv").write_text("\n".join(["path,label", *rows]))
    return "name: table, file: photos.csv, separator: '|'"


def vectors(names: Iterable[str]) -> str:
    labels = np.repeat(list(names), 6)
    np.save("labels.npy", labels)
    np.save("vectors.npy", np.random.default_rng(0).normal(size=(len(labels), 4)).astype(np.float32))
    return "name: vectors, embeddings: vectors.npy, labels: labels.npy"


def hugging_face(names: Iterable[str]) -> str:
    datasets = pytest.importorskip("datasets")
    images = [np.full((8, 8, 3), number, dtype=np.uint8) for number, _ in enumerate(names)]
    rows = {"image": [Image.fromarray(image) for image in images for _ in range(6)], "label": np.repeat(list(names), 6)}
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("string")})
    shutil.rmtree("photos", ignore_errors=True)
    datasets.Dataset.from_dict(rows, features=features).save_to_disk("photos")
    return "name: hf, root: photos"


def run_on(options: str) -> RunFolder:
    """A run that was started on a dataset, as far as its classes go."""
    network = "backbone: {name: identity}\n" if "vectors" in options else ""
    text = f"dataset: {{{options}, validation_fraction: 0.5}}\nloss: {{name: triplet}}\n{network}"
    recipe, run = parse_recipe(text, "recipe.yaml"), RunFolder(Path("run"))
    names = {split: recipe.dataset.build(split).class_names for split in SPLITS}
    run.create(recipe, overwrite=False)
    parts = {"training_classes": names["train"], "validation_classes": names["validation"]}
    RunClasses(**parts, test_classes=names["test"], images=1).write(run.classes_path)
    return run


def labels_of(run: RunFolder, *overrides: str) -> dict[str, list[tuple[str, int]]]:
    """Name of the class and label of every image of each split."""
    dataset = run.recipe(overrides).dataset
    built = {split: dataset.build(split) for split in SPLITS}
    return {
        split: [(images.class_names[label], label) for label in images.labels.tolist()]
        for split, images in built.items()
    }


def names_of(run: RunFolder, split: Split, *overrides: str) -> set[str]:
    return set(run.recipe(overrides).dataset.build(split).class_names)


@pytest.fixture(autouse=True)
def warned_again() -> None:
    warn_once.cache_clear()


@pytest.mark.parametrize("write", [class_folders, split_folders, table, label_sets, vectors, hugging_face])
def test_the_splits_of_a_run_are_those_of_its_classes_after_others_were_added(write, tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    run = run_on(write(FIRST))
    before = labels_of(run)
    write(GROWN)
    assert labels_of(run) == before  # with the order of the loss's proxies
    (line,) = {record.message for record in caplog.records}
    assert "8 classes are new since run was trained on it" in line and "and 3 more" in line
    added = names_of(run, "test", "dataset.new_classes=test") - {name for name, _ in before["test"]}
    unseen = [f"a{n}|c{n}" for n in (4, 5, 6, 7)] if write is label_sets else GROWN[:8]
    assert added == set(unseen)  # of label sets those without a label that the run was trained or chosen on


def test_a_class_that_is_gone_makes_no_other_class_a_test_class(tmp_path, monkeypatch, caplog):
    """Without c7 the halves of seven classes would be three and four: a validation class would be tested."""
    monkeypatch.chdir(tmp_path)
    run = run_on(class_folders(FIRST))
    shutil.rmtree("photos/c7")
    assert names_of(run, "test") == {"c4", "c5", "c6"}
    assert "photos: lacks 1 of the 4 test classes of run: c7" in caplog.text
    for name in ("c4", "c5", "c6"):
        shutil.rmtree(Path("photos", name))
    message = "lacks 4 of the 4 test classes of run: c4, c5, c6, c7; restore their images"
    refuses(message, run.recipe().dataset.build, "test")


def test_other_data_are_divided_by_their_own_rule_with_a_word(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    run = run_on(class_folders(FIRST))
    for name in ("x0", "x1", "x2", "x3"):
        photo(Path("other", name, "0.png"), 0)
        photo(Path("other", name, "1.png"), 1)
    assert names_of(run, "test", "dataset.root=other", "dataset.validation_fraction=0") == {"x2", "x3"}
    assert "other: has none of the classes of run" in caplog.text


def test_a_run_without_the_list_of_its_classes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    run = run_on(class_folders(FIRST))
    run.classes_path.unlink()
    assert run.recipe().dataset.classes_of_run is None  # killed before its first checkpoint
    run.checkpoint_path("last").write_bytes(b"weights")
    refuses(r"classes\.json", run.recipe)


def write_recipe() -> None:
    dataset = f"dataset: {{{class_folders(FIRST)}, validation_fraction: 0.5}}"
    text = ONE_EPOCH.replace("batch_size: 8", "batch_size: 4").replace(ONE_EPOCH.splitlines()[1], dataset)
    Path("recipe.yaml").write_text(text)


COMMANDS = (
    "eval run --json",
    "eval run --checkpoint pretrained",
    "eval run --with other",
    "eval run --evidence center",
    "eval run photos --split test",
    "compare run other",
    "embed run --split test -o embeddings",
    "calibrate run --far 0.4",
    "search run photos/c4/0.png",
    "cluster run -k 4",
    "duplicates run",
    "inspect run -o page.html",
    "plot pca run -o pca.png",
    "plot heatmap run -o heatmap.png",
    "plot retrieval run -o retrieval.png",
    "export run --format hub -o hub",
)


def test_no_command_on_a_run_takes_a_new_class_for_one_of_its_own(dmlkit, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_recipe()
    for name, seed in (("run", 1), ("other", 2)):
        assert dmlkit("train", "recipe.yaml", "-o", name, "--set", f"seed={seed}", "--device", "cpu").code == 0
    before = dmlkit("eval", "run", "--json").json()["metrics"]
    class_folders(GROWN)
    divided: list[tuple[str, set[str]]] = []
    divide = DatasetConfig.images_of

    def watched(config: DatasetConfig, listing: Listing | None, split: Split) -> Dataset:
        images = divide(config, listing, split)
        divided.append((split, set(images.class_names)))
        return images

    monkeypatch.setattr(DatasetConfig, "images_of", watched)
    own = {"train": {"c0", "c1"}, "validation": {"c2", "c3"}, "test": {"c4", "c5", "c6", "c7"}}
    wrong: list[object] = []
    for command in COMMANDS:
        divided.clear()
        shown = dmlkit(*command.split())
        taken = [(split, names) for split, names in divided if split != "all" and names != own[split]]
        if shown.code or taken or not divided:
            wrong.append((command, shown.err, taken))
    assert not wrong, wrong
    assert dmlkit("eval", "run", "--json").json()["metrics"] == before
    added = dmlkit("eval", "run", "--json", "--set", "dataset.new_classes=test")
    assert json.loads(added.out)["classes"] == 12
    Path("photos/c0/3.png").write_bytes(Path("photos/c0/2.png").read_bytes())
    of_all = " ".join(dmlkit("eval", "run", "photos").out.split())
    assert "2 classes were trained on; these metrics do not measure unseen classes" in of_all


def test_a_run_resumes_on_its_own_classes_after_others_were_added(dmlkit, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_recipe()
    words = ("train", "recipe.yaml", "--device", "cpu")
    assert dmlkit(*words, "-o", "whole").code == 0
    with monkeypatch.context() as patch:
        patch.setattr(training, "stop_signals", lambda: nullcontext(lambda _: True))
        assert dmlkit(*words, "-o", "run").code == 130
    class_folders(GROWN)
    assert dmlkit(*words, "-o", "run", "--resume").code == 0
    one, two = (RunFolder(Path(name)).load_checkpoint("last") for name in ("whole", "run"))
    assert all(one["model"][name].equal(weight) for name, weight in two["model"].items())
    figures = (Summary.read(Path(name, "summary.json")) for name in ("whole", "run"))
    assert len({repr((one.last, one.best)) for one in figures}) == 1


@pytest.mark.parametrize(("lost", "classes"), [("validation", ["c2", "c3"]), ("test", ["c4", "c5", "c6", "c7"])])
def test_conditions_that_no_image_of_a_split_fulfills_are_told_with_its_values(lost, classes, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = run_on(table(FIRST))
    lines = Path("photos.csv").read_text().splitlines()
    sides = ["side", *("right" if line.split(",")[1] in classes else "left" for line in lines[1:])]
    Path("photos.csv").write_text("\n".join(f"{line},{side}" for line, side in zip(lines, sides, strict=True)))
    limited = run.recipe().dataset.limited(Where.of("side=left"))
    message = f"--where 'side=left': photos.csv, the {lost} classes of run: no row is left; its column 'side' has right"
    refuses(message, limited.build, lost)
    assert len(limited.build("train")) == 12
    Path("photos.csv").write_text("\n".join(["path,label,side", "photos/c0/0.png,,left", "photos/c4/0.png,c4,right"]))
    refuses("the test classes of run: no row is left; its column 'side' has right", limited.build, "test")
