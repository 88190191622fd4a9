"""Folders of images: which classes train and which test."""

import os
from pathlib import Path

import pytest

from dmlkit.datasets import Cub200Config, FolderConfig, TableConfig
from dmlkit.datasets.base import SPLITS, Split
from dmlkit.datasets.folder import folder_levels
from dmlkit.errors import UserError
from dmlkit.vectors.images import images_at
from tests.conftest import refuses
from tests.datasets import trees


def test_the_first_half_of_the_sorted_classes_trains(tmp_path):
    trees.plain(tmp_path, {"d": 2, "a": 3, "c": 2, "b": 2, "e": 2})
    (tmp_path / "a" / "notes.txt").write_text("no image")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "again").symlink_to(tmp_path)  # with all images in a class of its own
    (tmp_path / "above").symlink_to(tmp_path.parent)
    config = FolderConfig(root=str(tmp_path), validation_fraction=0.0)
    train, test, everything = (config.build(split) for split in ("train", "test", "all"))
    assert train.class_names == ("a", "b") and train.labels.tolist() == [0, 0, 0, 1, 1]
    assert test.class_names == ("c", "d", "e") and test.labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert everything.class_names == ("a", "b", "c", "d", "e")
    image, label = train[4]
    assert label == 1 and image[:, 0, 0].tolist() == [1, 1, 0]


def test_folders_that_name_one_label_are_one_class_and_unknown_is_none(tmp_path):
    folders = ("a", "a ", "b", "Mo\u0308we", "M\xf6we", "Unknown", "d")
    config = FolderConfig(root=str(trees.plain(tmp_path, dict.fromkeys(folders, 3))), validation_fraction=0)
    assert config.build("train").class_names == ("M\xf6we", "a")  # in the order of their folders
    assert config.build("test").class_names == ("b", "d") and len(config.build("all")) == 18
    listing = config.listing()
    assert len(listing.everything()) == 21 and [note.partition(": ")[2] for note in listing.notes] == [
        r"6 images have a label in another spelling: 'Mo\u0308we' as 'M\xf6we', 'a ' as 'a'",
        "3 images have no label (empty or 'unknown'), to be left out of all losses and metrics",
    ]
    nested = trees.plain(tmp_path / "nested", {"p/q": 2, "p/unknown": 2, "p /r": 2, "s/t": 2, "s/u": 2})
    config = FolderConfig(root=str(nested), levels=("genus", "species"), validation_fraction=0)
    assert config.build("all").class_names == ("p/q", "p/r", "s/t", "s/u") and len(config.build("all")) == 8


@pytest.mark.skipif(os.name == "nt", reason="a name cannot have a colon there")
def test_a_class_may_have_a_letter_and_a_colon(tmp_path):
    config = FolderConfig(root=str(trees.plain(tmp_path, {"j: k": 2, "k": 3})))
    assert config.build("all").class_names == ("j: k", "k") and len(config.build("all")) == 5
    (tmp_path / "list.csv").write_text("path,label\nj: k/0.png,j\nj: k/1.png,j\nk/0.png,k\nk/1.png,k\n")
    assert len(TableConfig(file=str(tmp_path / "list.csv"), root=str(tmp_path)).build("all")) == 4
    (tmp_path / "list.csv").write_text("path,label\nC:/birds/9.png,j\nC:\\birds\\9.png,j\n")
    config = TableConfig(file=str(tmp_path / "list.csv"), root=str(tmp_path))
    refuses("path 'C:/birds/9.png' leads out", config.build, "all")


def test_explicit_folders_of_splits(tmp_path):
    trees.plain(tmp_path, {"train/x": 2, "train/y/deep": 2, "train/z": 2, "test/a": 2})
    config = FolderConfig(root=str(tmp_path), validation_fraction=0.5)
    assert config.build("train").class_names == ("x",)
    assert config.build("validation").class_names == ("y", "z")
    assert config.build("validation").labels.tolist() == [0, 0, 1, 1]
    assert config.build("test").class_names == ("a",)
    trees.plain(tmp_path, {"validation/v": 2})
    names = {split: FolderConfig(root=str(tmp_path)).build(split).class_names for split in SPLITS}
    assert names == {"train": ("x", "y", "z"), "validation": ("v",), "test": ("a",)}


def test_bad_folders_are_explained(tmp_path):
    (tmp_path / "empty").mkdir()
    refuses("no class folders", FolderConfig(root=str(tmp_path / "empty")).build, "test")
    vacant = trees.plain(tmp_path / "vacant", {"a": 2, "b": 2, "c": 2, "d": 2})
    for name in ("b", "d"):
        for path in (vacant / name).iterdir():
            path.unlink()
    with pytest.raises(UserError, match=r"2 class folders have no images: \S+/b, \S+/d; add images or remove the fol"):
        FolderConfig(root=str(vacant)).build("train")
    half = trees.plain(tmp_path / "half", {"train/a": 2})
    refuses("has a folder 'train' but no folder 'test'", FolderConfig(root=str(half)).build, "train")


@pytest.mark.parametrize(
    ("folders", "message"),
    [
        (["a"], "ROOT: has 1 class, a; .*: give ROOT/a, which has several"),
        (["a/b"], "ROOT: has 1 class, a; .*: give ROOT/a/b, which has several"),
        (["train/a", "test/b"], "ROOT/train: has 1 class, a; .* move the folders of ROOT/train/a to ROOT/train"),
        (["train/a", "test/a"], "ROOT/train: has 1 class, a; .* move the folders of ROOT/train/a to ROOT/train"),
        (["train", "test/b"], "ROOT/test: has 1 class, b; .* move the folders of ROOT/test/b to ROOT/test"),
        (["a", "b"], "ROOT: has 2 classes, a, b; .*: if the classes are those in ROOT/a, give it, or name the levels"),
    ],
)
@pytest.mark.parametrize("split", ["train", "validation"])
def test_classes_that_are_deeper_are_found(tmp_path: Path, split: Split, folders: list[str], message: str):
    trees.plain(tmp_path, {f"{folder}/{folder[-1]}{number}": 2 for folder in folders for number in range(4)})
    refuses(message.replace("ROOT", str(tmp_path)), FolderConfig(root=str(tmp_path)).build, split)


def test_the_depth_of_nested_folders_counts_only_folders_without_images(tmp_path: Path):
    for genus, species in (("crow", "corax"), ("crow", "corone"), ("gull", "argus")):
        trees.photo(tmp_path / genus / species / "1.jpg", 1)
    assert [len(folder_levels(place)) for place in (tmp_path, tmp_path / "crow")] == [2, 1]
    trees.photo(tmp_path / "gull" / "1.jpg", 2)  # a class with images, and a folder of its own
    assert [len(folder_levels(place)) for place in (tmp_path, tmp_path / "gull" / "argus")] == [1, 1]


def test_the_title_of_own_data_is_their_place():
    assert [FolderConfig(root="my/photos").title, TableConfig(file="a.csv").title] == ["my/photos", "a.csv"]
    assert Cub200Config(root="data/cub").title == "cub200"


def test_a_class_may_be_called_train(tmp_path: Path):
    """Of vehicles; a folder train with classes below it is a split, and so is one next to test."""
    trees.plain(tmp_path / "vehicles", {"boat": 2, "bus": 2, "car": 2, "train": 2})
    config = FolderConfig(root=str(tmp_path / "vehicles"), validation_fraction=0)
    assert config.build("train").class_names + config.build("test").class_names == ("boat", "bus", "car", "train")
    assert images_at(tmp_path / "vehicles").class_names == ("boat", "bus", "car", "train")
    trees.plain(tmp_path / "plain", {"train": 2, "test": 2, "masks": 2})
    refuses("no class folders", FolderConfig(root=str(tmp_path / "plain")).listing)
