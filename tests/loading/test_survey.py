"""A quick look at photos, against photos that are made here."""

from pathlib import Path

import pytest
from PIL import Image

from dmlkit.datasets.folder import FolderConfig
from dmlkit.datasets.glyphs import GlyphsConfig
from dmlkit.datasets.table import TableConfig
from dmlkit.errors import UserError
from dmlkit.loading.survey import SAMPLE, survey


def write_photos(root: Path, counts: dict[str, int], size: tuple[int, int] = (30, 20)) -> None:
    for name, count in counts.items():
        (root / name).mkdir(parents=True)
        for number in range(count):
            Image.new("RGB", size, (number, 0, 0)).save(root / name / f"{number}.png")


def test_counts_the_images_and_classes_of_each_split(tmp_path: Path) -> None:
    write_photos(tmp_path, {"a": 2, "b": 5, "c": 3, "d": 4, "e": 2, "f": 7})
    found = survey(FolderConfig(root=str(tmp_path)))
    assert found.images == {"train": 10, "validation": 0, "test": 13}
    assert found.classes == {"train": 3, "validation": 0, "test": 3}
    assert found.per_class == (2, 3, 5)
    assert not found.names_validation
    assert (found.sides, found.unreadable) == ((20, 20, 20), 0)


def test_a_dataset_that_names_its_validation_classes_is_told(tmp_path: Path) -> None:
    for split, name in (("train", "a"), ("validation", "b"), ("test", "c")):
        write_photos(tmp_path / split, {name: 2})
    assert survey(FolderConfig(root=str(tmp_path))).names_validation


def test_the_sides_are_those_of_boxes_where_a_table_has_them(tmp_path: Path) -> None:
    write_photos(tmp_path, {"a": 2, "b": 2}, size=(100, 80))
    rows = ["path,label,x1,y1,x2,y2"]
    rows += [f"{name}/{number}.png,{name},10,10,{20 + 30 * number},{50 + number}" for name in "ab" for number in (0, 1)]
    (tmp_path / "table.csv").write_text("\n".join(rows))
    assert survey(TableConfig(file=str(tmp_path / "table.csv"))).sides == (10, 25, 40)


def test_of_many_photos_a_sample_is_measured_and_what_cannot_be_opened_is_counted(tmp_path: Path) -> None:
    write_photos(tmp_path, {"a": 250, "b": 3})
    (tmp_path / "b" / "2.png").write_bytes(b"no image")
    advanced: list[int] = []
    found = survey(FolderConfig(root=str(tmp_path)), advanced.append)
    assert sum(advanced) == SAMPLE
    assert found.unreadable == 1  # the last image is always of the sample
    assert found.images["train"] == 250


def test_photos_none_of_which_opens_are_told(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        for number in (0, 1):
            (tmp_path / name / f"{number}.jpg").write_bytes(b"")
    with pytest.raises(UserError, match=r"none of 4 images could be opened; the last error: .*the file is empty"):
        survey(FolderConfig(root=str(tmp_path)))


def test_rendered_images_are_no_photos() -> None:
    with pytest.raises(UserError, match="glyphs: the images are rendered"):
        survey(GlyphsConfig())
