"""dmlkit data check: intact and damaged miniature trees, every fault on a line of its own."""

import os
import re
from pathlib import Path

import pytest
from PIL import Image

from dmlkit.datasets import Cub200Config, FolderConfig, cars196
from dmlkit.datasets.base import DatasetConfig
from dmlkit.files.image_file import MAX_PIXELS
from dmlkit.loading.check import Findings, check_files, check_images
from tests.datasets import trees


def check(config: DatasetConfig) -> Findings:
    listing, report = check_files(config)
    check_images(config, listing, report)
    return report


def found(report: Findings) -> dict[str, str]:
    return {row.check: row.found for row in report.rows}


def test_a_folder_without_errors(tmp_path: Path):
    report = check(FolderConfig(root=str(trees.presplit(tmp_path)), validation_fraction=0))
    assert not report.errors and not report.faults and not report.notes
    assert found(report)["train images"] == "6" and found(report)["test classes"] == "2"
    assert found(report)["train images per class, min / median / max"] == "3 / 3 / 3"


@pytest.mark.parametrize(
    ("make", "recognised", "counts"),
    [
        (trees.cub, "cub200", {"train images": "5,864", "test images": "5,924", "train classes": "100"}),
        (trees.cars, "cars196", {"train images": "8,054", "test images": "8,131", "test classes": "98"}),
        (trees.cars_kaggle, "cars196", {"train images": "8,054"}),
        (trees.sop, "sop", {"train classes": "11,318", "test classes": "11,316", "test images": "60,502"}),
        (trees.inshop, "inshop", {"train images": "25,882", "query images": "14,218", "gallery images": "12,612"}),
    ],
)
def test_benchmarks_are_recognised_and_counted(make, recognised, counts, tmp_path, dmlkit, monkeypatch):
    monkeypatch.setattr(cars196, "MD5", {})  # those of the miniature are others
    make(tmp_path)
    report = check(DatasetConfig.variants[recognised](root=str(tmp_path), validation_fraction=0))
    assert report.errors and not report.faults  # only the counts are wrong
    rows = {row.check: row for row in report.rows}
    for name, expected in counts.items():
        assert rows[name].expected == expected and rows[name].verdict == "fault"
    result = dmlkit("data", "check", tmp_path)
    assert result.code == 1 and f"{recognised}:" in result.out.replace("\n", "")


@pytest.mark.usefixtures("images_have_readers")
def test_every_fault_of_a_damaged_copy_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    root = trees.presplit(tmp_path)
    train = root / "train" / "1"
    (train / "0.jpg").write_bytes(b"")
    (train / "1.jpg").write_bytes((train / "1.jpg").read_bytes()[:-40])
    (root / "test" / "102" / "0.jpg").write_bytes((root / "train" / "2" / "0.jpg").read_bytes())
    frames = [Image.new("RGB", (9, 9), color) for color in ("red", "blue")]
    frames[0].save(root / "test" / "101" / "film.gif", save_all=True, append_images=frames[1:])
    Image.new("1", (10_000, MAX_PIXELS // 10_000 + 1)).save(root / "test" / "101" / "huge.png")
    Image.new("RGB", (9, 9)).save(os.fsencode(root / "test" / "101") + b"/m\xf6we.png", "png")
    (root / "test" / "2").mkdir()
    trees.photos(root / "test" / "2", (f"{index}.jpg" for index in range(2)), first=50)
    report = check(FolderConfig(root=str(root)))
    lines = "\n".join(report.faults)
    assert f"{train}/0.jpg: cannot read this image: the file is empty" in lines
    assert f"{train}/1.jpg: cannot read this image: " in lines and "truncated" in lines
    assert f"duplicate across classes: {root}/train/2/0.jpg, {root}/test/102/0.jpg" in lines
    assert "huge.png: the image has 10000 x 8001 pixels; expected at most 80,000,000" in lines
    assert "m\\udcf6we.png': this name is not UTF-8" in lines
    assert "1 class is in several splits (2), but those of the test split must be unseen in training" in lines
    assert len(report.faults) == 6
    assert report.notes == [
        f"1 image has more than one frame or page, of which the first is used: {root}/test/101/film.gif",
        f"1 image has only one color: {root}/test/101/film.gif",
    ]
    assert found(report)["unreadable"] == "3"


def test_images_of_one_color_are_one_note(tmp_path: Path):
    root = trees.presplit(tmp_path)
    colors = ["black", "white", (200, 30, 40), "blue", "green", "red", "pink"]
    for number, color in enumerate(colors):
        Image.new("RGB", (9, 9), color).save(root / "test" / "101" / f"plain{number}.png")
    nearly = Image.new("RGB", (9, 9))
    nearly.putpixel((8, 8), (0, 0, 1))
    nearly.save(root / "test" / "101" / "nearly.png")
    five = ", ".join(f"{root}/test/101/plain{number}.png" for number in range(5))
    assert check(FolderConfig(root=str(root))).notes == [f"7 images have only one color: {five} and 2 more"]


def test_duplicates_of_a_benchmark_are_noted_only(tmp_path: Path):
    root = trees.cub(tmp_path)
    first, other = (sorted((root / "CUB_200_2011" / "images" / trees.CUB[label]).iterdir()) for label in (1, 2))
    first[1].write_bytes(first[0].read_bytes())
    other[0].write_bytes(first[2].read_bytes())
    report = check(Cub200Config(root=str(root), validation_fraction=0))
    assert not report.faults and len(report.notes) == 2
    assert found(report)["duplicates within a class"] == found(report)["duplicates across classes"] == "1"


def test_a_truncated_archive_and_a_missing_member(tmp_path: Path):
    (tmp_path / "CUB_200_2011.tgz").write_bytes(b"half a download")
    root = trees.cub(tmp_path / "cub")
    gone = next((root / "CUB_200_2011" / "images" / trees.CUB[1]).iterdir())
    gone.unlink()
    report = check(Cub200Config(root=str(root), validation_fraction=0))
    assert f"{gone}: cannot read this image: file not found" in report.faults
    row = report.rows[0]
    assert row.verdict == "fault" and row.expected == "97eceeb196236b17998738112f37df78" and "15 bytes" in row.found


def test_command(dmlkit, tmp_path: Path, tiny_recipe: Path):
    result = dmlkit("data", "check", tmp_path / "none", "--dataset", "sop")
    assert result.code == 2 and "Stanford_Online_Products.zip" in result.err and "CUB" not in result.err
    dmlkit("data", "check", tmp_path / "none", "--dataset", "sob").refused(
        "expected cars196, cub200, inshop, sop, folder"
    )
    dmlkit("data", "check", tiny_recipe).refused("rendered")
    root = trees.presplit(tmp_path / "tree")
    assert dmlkit("data", "check", root).ok().out.rstrip().endswith("no errors found")
    (root / "test" / "101" / "0.jpg").write_bytes(b"")
    result = dmlkit("data", "check", tiny_recipe, "--set", f"dataset={{name: folder, root: '{root}'}}")
    assert result.code == 1 and "error: " in result.out and re.search(r"\d errors? found\n$", result.out)
    dmlkit("data", "check", root, "--set", "seed=1").refused("--set applies only to recipes")


def test_the_number_of_errors_is_that_of_the_lines_and_other_files_are_named(dmlkit, tmp_path: Path):
    root = trees.presplit(tmp_path / "tree")
    for name in ("train/1/0.jpg", "notes.txt", "train/notes.csv", "train/1/.hidden", "test/stray.jpg"):
        (root / name).write_bytes(b"x")
    lines = dmlkit("data", "check", root).out.splitlines()
    assert lines[-1] == "1 error found" and sum(line.startswith("error: ") for line in lines) == 1
    assert [line for line in lines if line.startswith("note: ")] == [
        f"note: {root}: 4 files are left out: 1 in no class folder, e.g. test/stray.jpg; 1 .csv, e.g. train/notes.csv; "
        "1 .txt, e.g. notes.txt; 1 hidden, e.g. train/1/.hidden"
    ]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "no images for train"),
        ([("a", "train")] * 2 + [("b", "train")] * 2, "no images for test"),
        ([("a", "")] * 4, "expected train, validation, test"),
        ([("a", "train")] * 2 + [("b", "test")] * 2, "test has a single class, expected at least two"),
        ([("a", "train")] * 2 + [("b", "test"), ("c", "test")] * 2, "train has a single class, expected at least two"),
    ],
)
def test_a_table_that_cannot_be_trained_on_is_an_error_u11(rows: list[tuple[str, str]], message: str, tmp_path, dmlkit):
    lines = [f"{index}.jpg,{label},{split}" for index, (label, split) in enumerate(rows)]
    (tmp_path / "table.csv").write_text("\n".join(["path,label,split", *lines]) + "\n")
    trees.photos(tmp_path, (f"{index}.jpg" for index in range(len(rows))))
    result = dmlkit("data", "check", tmp_path / "table.csv")
    out = " ".join(result.out.split())
    assert result.code == 1 and re.search(r"\d errors? found$", out) and message in out


def test_a_recipe_is_checked_with_its_own_validation_classes_u11(dmlkit, tiny_recipe: Path, tmp_path: Path):
    root = trees.presplit(tmp_path / "tree")
    result = dmlkit("data", "check", tiny_recipe, "--set", f"dataset={{name: folder, root: '{root}'}}")
    assert result.code == 1 and "dataset.validation_fraction: 0.1 of 2 training classes" in " ".join(result.out.split())
    ours = f"dataset={{name: folder, root: '{root}', validation_fraction: 0}}"
    for recipe in (tiny_recipe, "glyphs/proxy_anchor"):  # also one that comes with dmlkit, by its name
        assert "folder: " in dmlkit("data", "check", recipe, "--set", ours).ok().out


def test_a_file_of_another_kind_is_told_u12(dmlkit, tmp_path: Path):
    (tmp_path / "t.txt").write_text("path,label\n")
    dmlkit("data", "check", tmp_path / "t.txt").refused(
        f"{tmp_path / 't.txt'}: unsupported kind of file; expected a table (.csv, .tsv,"
    )


@pytest.mark.parametrize(("classes", "is_enough"), [(3, False), (4, True)])
def test_the_check_of_a_recipe_finds_too_few_training_classes_where_train_does(
    classes: int, is_enough: bool, dmlkit, tiny_recipe: Path, tmp_path: Path
):
    """Two of them are for validation."""
    folders = [*(f"train/{label}" for label in range(classes)), "test/x", "test/y"]
    trees.photos(tmp_path / "tree", (f"{folder}/{index}.jpg" for folder in folders for index in range(6)))
    ours = f"dataset={{name: folder, root: '{tmp_path / 'tree'}', validation_fraction: 0.1}}"
    checked = dmlkit("data", "check", tiny_recipe, "--set", ours)
    trained = dmlkit("train", tiny_recipe, "--set", ours, "--dry-run", "-o", tmp_path / "run", "--device", "cpu")
    assert (checked.code == 0, trained.code == 0) == (is_enough, is_enough), (checked.out, trained.err)
    assert ("train has a single class, expected at least two" in " ".join(checked.out.split())) != is_enough


def test_the_own_validation_images_of_a_table_are_checked(dmlkit, tiny_recipe: Path, tmp_path: Path):
    """Each of their classes has a single image, so there is nothing to find; train refuses them."""
    splits = {"train": "aabb", "validation": "cd", "test": "eeff"}
    rows = [(label, split) for split, labels in splits.items() for label in labels]
    trees.photos(tmp_path, (f"{index}.jpg" for index in range(len(rows))))
    lines = [f"{index}.jpg,{label},{split}" for index, (label, split) in enumerate(rows)]
    (tmp_path / "t.csv").write_text("\n".join(["path,label,split", *lines]))
    checked = dmlkit("data", "check", tmp_path / "t.csv")
    ours = f"dataset={{name: table, file: '{tmp_path / 't.csv'}'}}"
    trained = dmlkit("train", tiny_recipe, "--set", ours, "--dry-run", "-o", tmp_path / "run", "--device", "cpu")
    assert checked.code == 1 and trained.code == 2
    reason = " ".join(checked.out.split()).partition("error: ")[2].partition(": ")[2].removesuffix(" 1 error found")
    assert "validation" in reason and reason in " ".join(trained.err.split())
