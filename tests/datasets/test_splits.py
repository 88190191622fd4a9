"""Validation classes, the folds of the Reality Check protocol, and classes that cannot be searched."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dmlkit.datasets import Cub200Config, GlyphsConfig, InShopConfig
from dmlkit.datasets.base import class_fold
from dmlkit.datasets.files.dataset import lone_classes, search_faults
from dmlkit.datasets.vectors import VectorFile, Vectors
from dmlkit.errors import UserError
from dmlkit.recipe.file import parse_recipe
from tests.conftest import refuses
from tests.datasets import trees


@pytest.mark.parametrize(
    ("classes", "sizes"),
    [(200, (75, 25, 100)), (196, (74, 24, 98)), (22634, (8488, 2829, 11317))],
    ids=["cub200", "cars196", "sop"],
)
def test_folds_have_the_published_sizes(classes: int, sizes: tuple[int, int, int]):
    held_out = set[int]()
    for fold in range(4):
        parts = class_fold(classes, fold)
        assert held_out.isdisjoint(parts["validation"])
        held_out.update(parts["validation"])
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


def test_validation_needs_no_training_classes():
    config = GlyphsConfig(classes=4, images_per_class=2)  # half of them are for testing
    assert config.build("validation").class_names == config.load("train").class_names
    refuses(r"0\.1 of 2 training classes leaves 0 for training and 2 for validation", config.build, "train")


@pytest.mark.parametrize("split", ["official", "halves", "all", "images"])
def test_a_fold_belongs_to_the_reality_check(split: Any):
    with pytest.raises(ValueError, match=f"fold 2 needs split reality_check, got {split}"):
        GlyphsConfig(split=split, fold=2)


def test_a_run_of_a_fold_is_evaluated_on_another_split():
    text = "dataset: {name: glyphs, classes: 32, split: reality_check, fold: 2}\nloss: {name: triplet}\n"
    dataset = parse_recipe(text, "recipe.yaml", ["dataset.split=all"], is_trained=True).dataset
    assert dataset.build("all").class_names == GlyphsConfig(classes=32, split="all").build("all").class_names


def test_too_few_classes_and_two_sets_of_images_are_refused(tmp_path: Path):
    trees.cub(tmp_path / "cub")
    with pytest.raises(UserError, match="reality_check needs at least 16 classes, got 4"):
        Cub200Config(root=str(tmp_path / "cub"), split="reality_check").build("train")
    trees.inshop(tmp_path / "inshop")
    with pytest.raises(UserError, match="separate query and gallery images, which the dataset has"):
        InShopConfig(root=str(tmp_path / "inshop"), split="reality_check").build("train")


def images_of(labels: list[int], folder: Path, **more: torch.Tensor) -> Vectors:
    np.save(folder / "x.npy", np.eye(len(labels), dtype=np.float32))
    names, rows = [f"c{label}" for label in range(max(labels) + 1)], np.arange(len(labels))
    more |= {"labels": torch.tensor(labels)}
    return Vectors(VectorFile(folder / "x.npy"), rows, class_names=names, paths=[*map(str, rows)], **more)


@pytest.mark.parametrize("seed", range(30))
def test_lone_classes_are_those_of_a_loop_over_all_pairs(seed: int, tmp_path: Path):
    random = np.random.default_rng(seed)
    count = int(random.integers(6, 40))
    labels = [*range(5), *random.integers(0, 5, count - 5).tolist()]
    groups = torch.from_numpy(random.integers(0, int(random.integers(1, 12)), count))
    more: dict[str, torch.Tensor] = {"groups": groups} if seed % 2 else {}
    query = gallery = torch.ones(count, dtype=torch.bool)
    if seed % 3 == 0:
        query, gallery = (torch.from_numpy(random.random(count) < 0.6) for _ in range(2))
        more |= {"query": query, "gallery": gallery}
    found = lone_classes(images_of(labels, tmp_path, **more))

    def finds(label: int, *, apart: bool) -> bool:
        rows = [row for row in range(count) if labels[row] == label]
        return any(
            query[one] and gallery[two] and one != two and not (apart and groups[one] == groups[two])
            for one in rows
            for two in rows
        )

    asked = [label for label in range(5) if any(query[row] for row in range(count) if labels[row] == label)]
    alone = [label for label in asked if not finds(label, apart=False)]
    grouped = [label for label in asked if label not in alone and not finds(label, apart=bool(seed % 2))]
    names = [[f"c{label}" for label in part] for part in (alone, grouped)]
    assert found == (*names, len(asked) - len(alone) - len(grouped))


def test_a_split_without_images_has_nothing_to_find(tmp_path: Path):
    np.save(tmp_path / "x.npy", np.eye(2, dtype=np.float32))
    labels = torch.zeros(0, dtype=torch.long)
    empty = Vectors(VectorFile(tmp_path / "x.npy"), np.arange(0), class_names=["a"], paths=[], labels=labels)
    fault, notes = search_faults(empty, "test", "plug-in")
    assert fault == "plug-in: nothing to find in the test split: no class has two vectors" and notes == []


def test_many_lone_classes_are_one_line_with_five_names(tmp_path: Path):
    fault, (note,) = search_faults(images_of([*range(40), 40, 40], tmp_path), "test", "photos")
    assert fault is None and note == (
        "photos: 40 of 41 test classes have no second vector to find, so theirs are searched but are no queries: "
        "c0, c1, c2, c3, c4 and 35 more"
    )


def write_table(folder: Path, cameras: dict[str, str]) -> None:
    """Six photos of each class, half of the classes to train on; a camera per class, or one per photo."""
    with (folder / "photos.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["path", "label", "split", "group"])
        for number, (name, camera) in enumerate(cameras.items()):
            for index in range(6):
                path = trees.photo(folder / "photos" / name / f"{index}.png", 10 * number + index)
                split = "train" if number < len(cameras) // 2 else "test"
                rows.writerow([path, name, split, camera or f"{name}{index}"])


def test_one_camera_per_class_is_said_before_the_first_step_and_by_data_check(dmlkit, tiny_recipe, tmp_path, caplog):
    write_table(tmp_path, {name: f"camera of {name}" for name in "abcdefgh"})
    options = [f"dataset={{name: table, file: {tmp_path}/photos.csv, validation_fraction: 0}}", "sampler.batch_size=4"]
    words = ["train", tiny_recipe, "-o", tmp_path / "run", *(part for option in options for part in ("--set", option))]
    line = "nothing to find in the test split: all images of each class are of one group (camera, burst, video)"
    for command in (("data", "check", tmp_path / "photos.csv"), words, [*words, "--dry-run"]):
        shown = dmlkit(*command)
        assert shown.code in (1, 2) and line in " ".join((shown.out + shown.err).split()), shown
        assert "column group" in " ".join((shown.out + shown.err).split())
    assert not (tmp_path / "run").exists()
    write_table(tmp_path, {name: "" if name == "h" else f"camera of {name}" for name in "abcdefgh"})
    note = "3 of 4 test classes have all images in one group (camera, burst, video), which are not searched for each "
    assert note in " ".join(dmlkit("data", "check", tmp_path / "photos.csv").ok().out.split())
    assert dmlkit(*words, "--dry-run").code == 0 and note in caplog.text and "e, f, g" in caplog.text


def test_training_classes_of_one_group_each_are_a_note(tmp_path: Path):
    """As with one camera per class, whose background a model may learn."""
    labels = [0, 0, 0, 1, 1, 1]
    images = images_of(labels, tmp_path, groups=torch.tensor([5, 5, 5, 7, 7, 7]))
    fault, (note,) = search_faults(images, "train", "photos")
    assert fault is None and "all vectors of each training class are of one group (camera, burst, video)" in note
    for groups in ([5, 5, 6, 7, 7, 7], [0, 1, 2, 3, 4, 5]):
        assert search_faults(images_of(labels, tmp_path, groups=torch.tensor(groups)), "train", "photos") == (None, [])
