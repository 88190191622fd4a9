"""Every walk over a folder counts what it leaves out, and says so in one line."""

import os
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from dmlkit.datasets import Cub200Config, FolderConfig
from dmlkit.files.image_file import LeftOut, image_files
from dmlkit.files.image_table import read_images
from dmlkit.files.source import require_some_images
from dmlkit.vectors.images import images_at
from tests.conftest import refuses
from tests.datasets import trees


def other(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Two images of each of four classes, and what is none."""
    root = tmp_path / "photos"
    trees.photos(root, (f"{name}/{image}" for name in "abcd" for image in ("1.png", "deeper/2.jpg")))
    for name in ("a/notes.txt", "b/deeper/notes.txt", "a/.DS_Store", "a/1.HEIC", "b/1.nef", "c/README", "d/.git/1.png"):
        other(root / name)
    (root / "d" / "up").symlink_to("..")
    return root


MESSAGE = (
    "1 .heic (needs pillow-heif: pip install pillow-heif), e.g. a/1.HEIC; 1 .nef (raw; develop it to JPEG or TIFF), "
    "e.g. b/1.nef; 2 .txt, e.g. a/notes.txt; 1 hidden, e.g. a/.DS_Store; 1 hidden folder, e.g. d/.git; 2 more"
)


def test_a_folder_of_images(photos: Path, caplog: pytest.LogCaptureFixture):
    for _ in range(2):
        assert len(images_at(photos)) == 8
    assert caplog.messages[0] == f"{photos}: 8 files are left out: {MESSAGE}"
    assert len(caplog.messages) == 2 and "'a' of 'a/deeper'" in caplog.messages[1]  # once


def test_a_dataset(photos: Path, caplog: pytest.LogCaptureFixture):
    (photos / "d" / "up").unlink()
    for _ in range(2):
        assert len(FolderConfig(root=str(photos)).build("all")) == 8
    message = MESSAGE.replace("2 more", "1 more")
    assert caplog.messages == [f"{photos}: 7 files are left out: {message}"]


def test_class_folders_of_cub(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    trees.birds(tmp_path / "images", (f"{number:03}.Bird" for number in (1, 2, 101, 102)), 2)
    other(tmp_path / "images" / "001.Bird" / "notes.txt")
    assert len(Cub200Config(root=str(tmp_path)).build("all")) == 8
    assert caplog.messages == [f"{tmp_path}/images: 1 file is left out: 1 .txt, e.g. 001.Bird/notes.txt"]


@pytest.mark.parametrize("splits", [("",), ("train/", "test/")])
def test_what_is_in_no_class_folder(splits: tuple[str, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture):
    trees.birds(tmp_path, (f"{splits[number % len(splits)]}{name}" for number, name in enumerate("abcd")), 2)
    FolderConfig(root=str(tmp_path)).build("all")
    assert not caplog.messages
    trees.photos(tmp_path, ("loose.png", f"{splits[-1]}loose.png"))
    other(tmp_path / "labels.csv")
    names = ["labels.csv", "loose.png", *([f"{splits[-1]}loose.png"] if splits[-1] else [])]
    if splits[-1]:  # a folder that is no split
        trees.photos(tmp_path / "val" / "e", ["1.png"])
        other(tmp_path / "val" / "e" / "2.csv")
        names += ["val/e/1.png", "val/e/2.csv"]
    FolderConfig(root=str(tmp_path)).build("all")
    counts = Counter(Path(name).suffix for name in names)
    assert caplog.messages == [
        f"{tmp_path}: {len(names)} files are left out: {counts['.png']} in no class folder, e.g. loose.png; "
        f"{counts['.csv']} .csv, e.g. labels.csv"
    ]


def test_a_folder_that_links_lead_to_is_not_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    for name in "abcd":
        trees.photos(tmp_path / "all" / name, ("1.png", "2.png"))
        folder = tmp_path / ("train" if name < "c" else "test") / name
        folder.parent.mkdir(exist_ok=True)
        folder.symlink_to(tmp_path / "all" / name)
    assert len(FolderConfig(root=str(tmp_path)).build("all")) == 8
    assert not caplog.messages


def test_boxes_of_a_data_set_of_yolo_that_a_detector_was_not_sure_of(tmp_path: Path):
    """They were kept, whatever --box-confidence said."""
    trees.photo(tmp_path / "images" / "1.png", 1, side=(8, 8))
    (tmp_path / "labels").mkdir()
    (tmp_path / "labels" / "1.txt").write_text("0 .5 .5 .5 .5 .9\n0 .5 .5 .2 .2 .1\n")
    (tmp_path / "data.yaml").write_text("names: [fox]\ntrain: images\n")
    listed = read_images(tmp_path)
    assert listed.notes == [f"{tmp_path}/data.yaml: left out: 1 box of a confidence below 0.2 (--box-confidence)"]
    assert listed.table["x1"].to_pylist() == [2.0] and len(read_images(tmp_path, confidence=0.1)) == 2


@pytest.mark.parametrize("read", [images_at, require_some_images])
def test_a_folder_without_images_says_what_it_has(read: Callable[[Path], object], tmp_path: Path):
    other(tmp_path / "photos" / "a" / "1.heic")
    message = (
        f"{tmp_path}/photos: no images found in this folder or below it; 1 file is left out: 1 .heic "
        "(needs pillow-heif: pip install pillow-heif), e.g. a/1.heic"
    )
    refuses(f"^{re.escape(message)}$", read, tmp_path / "photos")


def test_the_count_is_that_of_all_files(tmp_path: Path):
    """Compare with a walk that looks at each name alone."""
    names = ["1.jpg", "2.JPEG", "3.tiff", "4.txt", ".5.png", "6", "7.nef", "8.avif", "9.jp2.bak"]
    for number, name in enumerate(names):
        other(tmp_path / f"{number % 3}" / f"{number % 2}" / name)
    left_out = LeftOut(tmp_path)
    found = image_files(tmp_path, left_out)
    every = [f"{place}/{name}" for place, _, files in os.walk(tmp_path) for name in files]
    assert sorted(found) == sorted(path for path in every if path.endswith(("1.jpg", "2.JPEG", "3.tiff", "8.avif")))
    assert left_out.counts.total() == len(every) - len(found)
