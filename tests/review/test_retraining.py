"""A model trained on a review: its table, and its comparison with the gallery's model, against a count by hand."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml

from dmlkit.cli import train as cli
from dmlkit.cli.console import say
from dmlkit.cli.train import table_of_review
from dmlkit.datasets import TableConfig
from dmlkit.evaluation.image_gallery import ImageGallery
from dmlkit.gallery.change import create_gallery
from dmlkit.gallery.images import LabelledImage
from dmlkit.review.folder import ReviewFolder
from dmlkit.review.proposals import ProposedLabel, Review
from dmlkit.review.retraining import TrainingTable, held_out_answers, write_training_table
from dmlkit.review.table import review
from dmlkit.run_folder.folder import RunFolder
from dmlkit.vectors.embedder import load
from tests.conftest import csv_rows
from tests.datasets import trees
from tests.gallery.conftest import BIRDS
from tests.vectors.stored import ON_CPU, embeddings_at


@pytest.fixture
def reviewed(place: Path, tmp_path: Path) -> Path:
    """A gallery of a run, and a review of an inbox in which every image but the last three has an answer."""
    create_gallery(place / "run", place / "photos", tmp_path / "gallery", model=ON_CPU)
    for index in range(30):
        trees.photo(tmp_path / "inbox" / f"@{index}.jpg", 100 + index, (40, 30))
    found, _ = review(tmp_path / "gallery", tmp_path / "inbox", tmp_path / "review", ask=30, model=ON_CPU)
    rows = range(len(found.review.proposals) - 3)
    found.reply({row: (*BIRDS, "@heron")[row % 5] for row in rows}, "ada")
    return tmp_path


def labels_of(table: Path, root: Path) -> dict[Path, str]:
    return {(root / row["path"]).resolve(): row["label"] for row in csv_rows(table)}


def accuracy(run: Path, known: dict[Path, str], asked: dict[Path, str]) -> float:
    """Share of images whose nearest known one, by a full matrix of similarities, has their label."""
    model, labels = load(run, device="cpu"), np.array([*known.values()])
    nearest = model.similarity(model.embed([*asked]), model.embed([*known])).argmax(1)
    return float((labels[nearest] == np.array([*asked.values()])).mean())


def test_a_model_is_trained_on_a_review_and_compared_on_what_it_has_not_seen(dmlkit, reviewed: Path, place: Path):
    words = ("train", place / "recipe.yaml", "--review", reviewed / "review", "-o", reviewed / "new")
    settings = ("--set", "sampler={name: random, batch_size: 8}", "--device", "cpu")
    result = dmlkit(*words, *settings).ok()
    assert [line.split()[:4] for line in result.out.splitlines() if line.startswith("next: ")] == [
        ["next:", "dmlkit", "gallery", "create"]
    ]
    dataset = RunFolder(reviewed / "new").recipe().dataset
    known = labels_of(reviewed / "review" / "train_new.csv", Path(dataset.model_dump()["root"]))
    opened = ReviewFolder(reviewed / "review")
    rows = {Path(one.path).resolve(): row for row, one in enumerate(opened.review.proposals)}
    asked = {path: str(opened.label(row)) for path, row in rows.items() if path not in known and opened.answers(row)}
    for path in asked:  # of a group, all images are held out or none
        group = (opened.review.proposals[row].path for row in opened.alike(rows[path]))
        assert not {Path(one).resolve() for one in group} & {*known}
    photos = {path for path in known if place in path.parents}
    assert len(photos) == 12 and 3 <= len(asked) <= 12
    assert all(known[path] == opened.label(row) for path, row in rows.items() if path in known)
    figures = json.loads((reviewed / "new" / "evaluations" / "review.json").read_text())
    assert figures["answers"] == len(asked) and figures["labels"] == len({*asked.values()})
    expected = [accuracy(run, known, asked) for run in (place / "run", reviewed / "new")]
    assert figures["accuracy"] == pytest.approx(expected)
    assert figures["difference"]["difference"] == pytest.approx(expected[1] - expected[0])
    assert f"{len(asked)} answers" in result.out and "that it was not trained on" in " ".join(result.out.split())
    assert dmlkit(*words, *settings, "--resume").ok().out.splitlines()[-1] == result.out.splitlines()[-1]


def test_images_held_out_stay_so_and_those_of_a_gallery_that_changed_are_left_out(reviewed: Path, place: Path):
    folder, photo = reviewed / "review", place / "photos" / "crow" / "0.jpg"
    first = labels_of((table := write_training_table(folder, "a")).file, table.root)
    assert (table.left_out, table.images) == (0, len(first))
    ImageGallery(reviewed / "gallery", device="cpu").add(reviewed / "inbox", label="crow")
    kept = photo.rename(reviewed / "kept.jpg")
    photo.write_bytes(kept.read_bytes() + b"another file")
    try:
        table = write_training_table(folder, "b")
    finally:
        kept.replace(photo)
    second = labels_of(table.file, table.root)  # the labels of the review precede those of the gallery
    assert table.left_out == 1 and second == {path: label for path, label in first.items() if path != photo.resolve()}


def test_what_cannot_be_trained_on_is_refused(dmlkit, reviewed: Path, place: Path):
    train = ("train", place / "recipe.yaml", "-o", reviewed / "new", "--device", "cpu", "--review")
    dmlkit(*train, reviewed / "inbox").refused("no review here (review.json is missing)")
    dmlkit(*train, reviewed / "review", "--dry-run").refused("--dry-run: does not apply with --review")
    assert not (reviewed / "new").exists()


def test_keys_of_the_recipe_that_hold_for_any_images_are_kept(dmlkit, place: Path, tmp_path: Path):
    """Labels that are paths stay paths, also where the run resumes; an answer that is none is refused in one line."""
    labels = Path(shutil.copytree(place / "photos", tmp_path / "photos")) / "labels.csv"
    rows = [f"{name}/{index}.jpg,{name[0]}/{name}" for name in BIRDS for index in range(3)]
    labels.write_text("\n".join(["path,label", *rows]))
    create_gallery(place / "run", labels, tmp_path / "gallery", model=ON_CPU)
    trees.photos(tmp_path / "inbox", (f"{index}.jpg" for index in range(8)), first=100, side=(40, 30))
    found, _ = review(tmp_path / "gallery", tmp_path / "inbox", tmp_path / "review", ask=8, model=ON_CPU)
    dataset = "{name: glyphs, levels: [initial, bird], on_bad_image: skip,"
    (tmp_path / "levels.yaml").write_text((place / "recipe.yaml").read_text().replace("{name: glyphs,", dataset))
    words = ("train", tmp_path / "levels.yaml", "--set", "sampler={name: random, batch_size: 8}", "--device", "cpu")
    words = (*words, "--review", tmp_path / "review", "-o")
    for again in ((), ("--resume",)):  # nothing is answered, so none is held out
        result = dmlkit(*words, tmp_path / "new", *again)
        before, _, after = " ".join(result.out.split()).partition("epoch 1/")
        assert result.code == 0 and ("is trained and not compared" in before or again), result.err
        assert "it was not trained on:" not in after and "next: dmlkit gallery create" in after + before
        table = " ".join(result.out.split()).rpartition("gallery create ")[2].partition(" -o ")[0].split()
        assert table[2] == "--root" and all((Path(table[3]) / row["path"]).exists() for row in csv_rows(Path(table[1])))
        dataset = RunFolder(tmp_path / "new").recipe().dataset
        assert isinstance(dataset, TableConfig) and dataset.levels == ("initial", "bird"), result.err
        assert dataset.on_bad_image == "skip"
        assert dataset.build("all").levels["initial"].unique().tolist() == [0, 1, 2, 3]
    found.reply(dict.fromkeys(range(8), "heron"), "ada")
    dmlkit(*words, tmp_path / "other").refused("the class 'heron' has 1 level, expected 2: initial/bird, the")


def test_a_table_that_a_run_may_have_been_trained_on_stays(reviewed: Path):
    """Another run of the same name gets another table, and the same one again for the same answers."""
    folder = reviewed / "review"
    first = write_training_table(folder, "june")
    kept = first.file.read_bytes()
    assert write_training_table(folder, "june") == first and len([*folder.glob("train_*.csv")]) == 1
    ReviewFolder(folder).reply({len(ReviewFolder(folder).review.proposals) - 1: "emu"}, "ada")
    files = [write_training_table(folder, "june").file for _ in range(2)]
    assert first.file.name == "train_june.csv" and first.file.read_bytes() == kept
    assert files[0] == files[1] != first.file and files[0].read_bytes() != kept


def test_boxes_of_embeddings_and_images_of_the_review_are_left_out(dmlkit, place: Path, tmp_path: Path):
    photos = Path(shutil.copytree(place / "photos", tmp_path / "photos"))
    trees.photos(tmp_path / "inbox", (f"{index}.jpg" for index in range(8)), first=100, side=(40, 30))
    shutil.copy(tmp_path / "inbox" / "0.jpg", photos / "dove" / "copy.jpg")
    boxes = ("crow,0,0,20,20", "gull,9,9,30,30")
    lines = [f"crow/{index}.jpg,{box}" for index in range(3) for box in boxes]
    others = [path.relative_to(photos) for name in ("dove", "finch") for path in sorted((photos / name).iterdir())]
    lines += [f"{path},{path.parent},,,," for path in others]
    (photos / "table.csv").write_text("\n".join(["path,label,x1,y1,x2,y2", *lines]))
    stored = tmp_path / "stored"
    dmlkit("embed", place / "run", photos / "table.csv", "-o", stored, "--labels", "label", "--device", "cpu").ok()
    review(stored, tmp_path / "inbox", tmp_path / "review", model=ON_CPU)
    table = write_training_table(tmp_path / "review", "new")
    trained = labels_of(table.file, table.root)
    assert table.left_out == 6 and len(trained) == table.images
    of_photos = {path: label for path, label in trained.items() if photos in path.parents}
    assert of_photos == {photos / path: path.parent.name for path in others if path.name != "copy.jpg"}


def test_copies_of_what_is_trained_on_and_files_that_are_gone_compare_nothing(tmp_path: Path):
    """Each photo comes twice, and no photos are in groups; the files of the gallery are missing."""
    paths = [trees.photo(tmp_path / "inbox" / f"{index}.jpg", index) for index in range(40)]
    paths += [Path(shutil.copy(path, path.with_stem(f"copy {path.stem}"))) for path in paths]
    labels = ["ab"[row % 2] for row in range(len(paths))]
    proposals = tuple(
        ProposedLabel(path=str(path), label=label, probability=0.9, id=LabelledImage(str(path), None).id())
        for path, label in zip(paths, labels, strict=True)
    )
    stored, folder = embeddings_at(tmp_path / "stored"), tmp_path / "review"
    folder.mkdir()
    kept = Review(gallery=str(stored), images="i", wrong=0.01, audit=0.5, names=("a", "b"), proposals=proposals)
    kept.write(folder / "review.json")
    ReviewFolder(folder).reply(dict(enumerate(labels)), "ada")

    def compared(name: str) -> tuple[TrainingTable, set[Path], set[Path]]:
        table = write_training_table(folder, name)
        config = TableConfig(file=str(table.file), root=str(table.root), split="all")
        rows = held_out_answers(ReviewFolder(folder), config.build("all"))
        return table, {*labels_of(table.file, table.root)}, {paths[row] for row in rows}

    table, trained, asked = compared("first")
    contents = {path.read_bytes() for path in trained}
    assert asked == {path for path in paths if path.read_bytes() not in contents} != set()
    assert (table.held_out, table.left_out) == (len(asked), 5) and len(contents) == len(trained)
    gone, changed = min(asked), min(trained)
    gone.unlink()
    changed.write_bytes(b"another file")
    table, now, left = compared("second")
    assert left == asked - {gone} and now == trained - {changed} | {changed.with_stem(f"copy {changed.stem}")}
    assert (table.held_out, table.left_out) == (len(left), 5 + 2)


def test_a_run_that_resumes_keeps_the_place_of_its_photos(monkeypatch: pytest.MonkeyPatch):
    kept = SimpleNamespace(dataset=TableConfig(file="photos/t.csv", split="all"))
    run = SimpleNamespace(holds_run=lambda: True, recipe=lambda: kept)
    monkeypatch.setattr("dmlkit.run_folder.folder.RunFolder", lambda _: run)
    key, _, text = table_of_review(Path("review"), Path("run"), {}, resume=True).partition("=")
    expected = {"name": "table", "file": "photos/t.csv", "root": None, "split": "all", "on_bad_image": "error"}
    assert (key, yaml.safe_load(text)) == ("dataset", expected)


def test_only_the_first_rank_prints_before_it_trains(dmlkit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "review.json").touch()

    def printing(*_: object, **__: object) -> str:
        say("9 images to train on")
        return "training.epochs=1"

    monkeypatch.setattr(cli, "table_of_review", printing)
    for name in ("has_held_out", "train_and_print", "print_comparison"):
        monkeypatch.setattr(cli, name, lambda *_, **__: None)
    for rank, printed in (("1", ""), ("0", "9 images to train on\n")):
        monkeypatch.setenv("RANK", rank)
        words = ("train", "glyphs/triplet", "--review", tmp_path, "-o", tmp_path / "new")
        assert dmlkit(*words).ok().out == printed
