"""Validation classes and the folds of the Reality Check protocol."""

from pathlib import Path

import pytest

from dmlkit.datasets import Cub200Config, GlyphsConfig, InShopConfig
from dmlkit.datasets.base import class_fold
from dmlkit.errors import UserError
from tests.datasets import trees


@pytest.mark.parametrize(
    ("classes", "sizes"),
    [(200, (75, 25, 100)), (196, (74, 24, 98)), (22634, (8488, 2829, 11317))],
    ids=["cub200", "cars196", "sop"],
)
def test_folds_have_the_published_sizes(classes: int, sizes: tuple[int, int, int]):
    for fold in range(4):
        parts = class_fold(classes, fold)
        assert tuple(map(len, parts.values())) == sizes
        assert sorted(label for part in parts.values() for label in part) == list(range(classes))
        assert parts["test"] == list(range(classes - sizes[2], classes))


def test_folds_are_those_of_the_protocol():
    cub = [class_fold(200, fold)["validation"] for fold in range(4)]
    assert [(part[0], part[-1]) for part in cub] == [(75, 99), (0, 24), (25, 49), (50, 74)]
    cars = {label for fold in range(4) for label in class_fold(196, fold)["validation"]}
    assert set(range(98)) - cars == {24, 73}  # as the protocol's code leaves them out


def test_a_dataset_is_cut_into_folds():
    whole = GlyphsConfig(classes=16, images_per_class=2)
    seen = []
    for fold in range(4):
        config = GlyphsConfig(classes=16, images_per_class=2, split="reality_check", fold=fold)
        train, validation, test = (config.build(split) for split in ("train", "validation", "test"))
        assert len(train.class_names) == 6 and len(validation.class_names) == 2
        assert test.class_names == whole.build("test").class_names
        assert not set(train.class_names) & set(validation.class_names)
        assert validation.labels.tolist() == [0, 0, 1, 1]
        seen += validation.class_names
    assert sorted(seen) == sorted(whole.load("train").class_names)


def test_too_few_classes_and_two_sets_of_images_are_refused(tmp_path: Path):
    trees.cub(tmp_path / "cub")
    with pytest.raises(UserError, match="reality_check needs at least 16 classes, got 4"):
        Cub200Config(root=str(tmp_path / "cub"), split="reality_check").build("train")
    trees.inshop(tmp_path / "inshop")
    with pytest.raises(UserError, match="separate query and gallery images, which the dataset has"):
        InShopConfig(root=str(tmp_path / "inshop"), split="reality_check").build("train")
