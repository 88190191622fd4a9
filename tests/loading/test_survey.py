"""A quick look at photos, against photos that are made here."""

from contextlib import nullcontext
from pathlib import Path

import pytest

from dmlkit.datasets.folder import FolderConfig
from dmlkit.datasets.glyphs import GlyphsConfig
from dmlkit.datasets.table import TableConfig
from dmlkit.loading.check import survey
from dmlkit.recipe.start import validation_fraction
from tests.conftest import refuses
from tests.datasets import trees


def test_counts_the_images_and_classes_of_each_split(tmp_path: Path) -> None:
    trees.plain(tmp_path, {"a": 2, "b": 5, "c": 3, "d": 4, "e": 2, "f": 7}, (30, 20))
    surveyed = survey(FolderConfig(root=str(tmp_path)))
    assert surveyed.images == {"train": 10, "validation": 0, "test": 13}
    assert surveyed.classes == {"train": 3, "validation": 0, "test": 3}
    assert surveyed.per_class == (2, 3, 5)
    assert not surveyed.names_validation
    assert (surveyed.sides, surveyed.measured, surveyed.unreadable) == ((20, 20, 20), 23, [])
    assert surveyed.trained == 10 and surveyed.held_out == {"test": ("d", "e", "f")}  # three classes are not divided


def test_a_dataset_that_names_its_validation_classes_is_told(tmp_path: Path) -> None:
    for split, names in (("train", "ab"), ("validation", "cd"), ("test", "ef")):
        trees.plain(tmp_path / split, dict.fromkeys(names, 2))
    surveyed = survey(FolderConfig(root=str(tmp_path)))
    assert surveyed.names_validation and surveyed.trained == 4
    assert surveyed.held_out == {"validation": ("c", "d"), "test": ("e", "f")}


def test_validation_classes_are_those_that_training_holds_out(tmp_path: Path) -> None:
    trees.plain(tmp_path, dict.fromkeys("abcdefghij", 2))
    surveyed = survey(FolderConfig(root=str(tmp_path)))
    config = FolderConfig(root=str(tmp_path), validation_fraction=validation_fraction(5))
    assert surveyed.held_out == {"validation": config.build("validation").class_names, "test": tuple("fghij")}
    assert surveyed.held_out["validation"] == ("d", "e") and surveyed.trained == len(config.build("train")) == 6


def test_classes_of_one_image_each_are_refused_in_one_line(tmp_path: Path) -> None:
    trees.plain(tmp_path, dict.fromkeys("abcdef", 1))
    said = f"^{tmp_path}: nothing to find in the test split: no class has two images$"
    refuses(said, survey, FolderConfig(root=str(tmp_path)))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("photso", "did you mean {0}/photos?"),
        ("PHOTOS/train", "did you mean {0}/photos?"),
        ("tabel.csv", "did you mean {0}/table.csv?"),
    ],
)
def test_a_mistyped_path_gets_one_line(asked: str, message: str, tmp_path: Path, dmlkit):
    (tmp_path / "photos").mkdir()
    (tmp_path / "table.csv").touch()
    if (tmp_path / "PHOTOS").exists():
        pytest.skip("this file system does not distinguish case")
    dmlkit("start", tmp_path / asked).refused(f"{tmp_path / asked}: no such file or folder; {message.format(tmp_path)}")


def test_the_sides_are_those_of_boxes_where_a_table_has_them(tmp_path: Path) -> None:
    trees.plain(tmp_path, {"a": 2, "b": 2, "c": 2, "d": 2}, size=(100, 80))
    rows = ["path,label,x1,y1,x2,y2"]
    rows += [
        f"{name}/{number}.png,{name},10,10,{20 + 30 * number},{50 + number}" for name in "abcd" for number in (0, 1)
    ]
    (tmp_path / "table.csv").write_text("\n".join(rows))
    assert survey(TableConfig(file=str(tmp_path / "table.csv"))).sides == (10, 25, 40)


def test_of_many_photos_a_sample_is_measured_and_what_cannot_be_opened_is_named(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("dmlkit.loading.check.SAMPLE", 20)
    trees.plain(tmp_path, {"a": 40, "b": 3, "c": 3, "d": 3})
    (tmp_path / "d" / "2.png").write_bytes(b"no image")
    advanced: list[int] = []
    surveyed = survey(FolderConfig(root=str(tmp_path)), lambda *_: nullcontext(advanced.append))
    assert sum(advanced) == surveyed.measured == 20
    assert surveyed.unreadable == [str(tmp_path / "d" / "2.png")]  # the last image is always of the sample
    assert surveyed.images["train"] == 43


def test_photos_none_of_which_opens_are_told(tmp_path: Path) -> None:
    trees.plain(tmp_path, dict.fromkeys("abcd", 2))
    for path in tmp_path.rglob("*.png"):
        path.write_bytes(b"")
    said = "none of 8 images could be opened; the last error: .*the file is empty"
    refuses(said, survey, FolderConfig(root=str(tmp_path)))


def test_rendered_images_are_no_photos() -> None:
    refuses("glyphs: the images are rendered", survey, GlyphsConfig())
