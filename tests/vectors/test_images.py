"""What is embedded of a folder: everything in it."""

import os
from pathlib import Path

import pytest

from dmlkit.datasets import FolderConfig, TableConfig
from dmlkit.recipe.file import parse_recipe
from dmlkit.vectors.images import dataset_of
from tests.conftest import TINY_RECIPE, Cli, refuses
from tests.datasets import trees


def embedded(folder: Path) -> list[str]:
    dataset = dataset_of(folder, "test", parse_recipe(TINY_RECIPE, "tiny.yaml"))
    return [os.path.relpath(path, folder) for path in dataset.paths]


def test_links_to_folders_are_followed_w6(tmp_path: Path):
    trees.photo(tmp_path / "photos" / "a" / "1.png", 0)
    trees.photo(tmp_path / "elsewhere" / "deep" / "2.png", 0)
    (tmp_path / "photos" / "zz").symlink_to(tmp_path / "elsewhere")
    assert embedded(tmp_path / "photos") == ["a/1.png", "zz/deep/2.png"]
    (tmp_path / "link").symlink_to("photos")
    assert embedded(tmp_path / "link") == ["a/1.png", "zz/deep/2.png"]


def test_links_in_a_circle_end_and_no_image_is_listed_twice(tmp_path: Path):
    trees.photo(tmp_path / "a" / "1.png", 0)
    trees.photo(tmp_path / "b" / "2.png", 0)
    (tmp_path / "a" / "up").symlink_to("..")
    (tmp_path / "a" / "beside").symlink_to("../b")
    (tmp_path / "b" / "beside").symlink_to("../a")
    assert embedded(tmp_path) == ["a/1.png", "a/beside/2.png"]


def test_a_folder_that_cannot_be_read_is_told_w6(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    trees.photo(tmp_path / "a" / "1.png", 0)
    trees.photo(tmp_path / "b" / "2.png", 0)
    scandir = os.scandir

    def guarded(path: str):  # root reads everything, whatever its permissions
        if str(path).endswith("/b"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", guarded)
    refuses(f"^{tmp_path}/b: cannot read this folder: Permission denied; change its permissions", embedded, tmp_path)


def test_the_table_of_split_folders_has_their_splits(tmp_path: Path, dmlkit: Cli):
    for name in ("train/wren", "train/gull", "validation/crow", "test/ant", "test/bee", "more/owl"):
        for index in range(2):
            trees.photo(tmp_path / "photos" / name / f"{index}.png", 0)
    trees.photo(tmp_path / "photos" / "top.png", 0)
    said = " ".join(dmlkit("data", "convert", tmp_path / "photos", "-o", tmp_path / "t.csv").ok().out.split())
    others = "top.png, more/owl/0.png, more/owl/1.png"
    assert f"note: {tmp_path / 'photos'}: left out: 3 images outside of train, validation and test: {others}" in said
    table = TableConfig(file=str(tmp_path / "t.csv"))
    folder = FolderConfig(root=str(tmp_path / "photos"))
    for split in ("train", "validation", "test"):
        ours, theirs = table.build(split), folder.build(split)
        assert sorted(ours.class_names) == sorted(theirs.class_names) and {*ours.paths} == {*theirs.paths}
