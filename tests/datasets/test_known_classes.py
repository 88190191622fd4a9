"""Splits with known classes in the test: by the images of the data's own splits, by order, by time, and of a run."""

import csv
from collections.abc import Sequence
from datetime import date, timedelta
from pathlib import Path

import numpy as np
import pytest

from dmlkit.datasets import FolderConfig, TableConfig
from dmlkit.datasets.base import SPLITS, DatasetConfig
from dmlkit.datasets.files.class_names import SplitClasses
from dmlkit.errors import OptionError, UserError, warn_once
from tests.conftest import refuses
from tests.datasets import trees


def table(folder: Path, rows: Sequence[dict[str, str]], **options: object) -> TableConfig:
    """A table of photos that need not exist."""
    with (folder / "photos.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return TableConfig.model_validate({"file": str(folder / "photos.csv"), **options})


def random_rows(seed: int, *, days: int = 10_000) -> list[dict[str, str]]:
    """Photos of 12 individuals with 1 to 15 photos each, in random order, at random days."""
    random = np.random.default_rng(seed)
    labels = np.repeat([f"i{number:02}" for number in range(12)], random.integers(1, 16, 12))
    random.shuffle(labels)
    dates = random.choice(days, len(labels), replace=days < len(labels))
    start = date(2000, 1, 1)
    times = [str(start + timedelta(day)) for day in dates.tolist()]
    return [{"path": f"{row}.jpg", "label": labels[row], "time": time} for row, time in enumerate(times)]


def names_of(config: DatasetConfig, split: str) -> set[str]:
    return {Path(path).name for path in config.build(split).paths}


def parts_of(config: DatasetConfig, *splits: str) -> list[set[str]]:
    """The names of several splits of a table that is read once."""
    listing = config.listed()
    return [{Path(path).name for path in config.images_of(listing, split).paths} for split in splits]


@pytest.mark.parametrize("seed", range(16))
@pytest.mark.parametrize(
    ("key", "share"), [("path", 0.8), ("time", 0.8), ("time", 0.5), ("time", 0.75), ("group", 0.8)]
)
def test_the_nearest_cut_that_divides_no_day_and_no_group_is_that_of_a_loop(seed, key, share, tmp_path):
    """Of each class, by time or in the order of the table; of two cuts as near the earlier, and none of one image."""
    random = np.random.default_rng(seed)
    rows = random_rows(seed, days=10_000 if seed % 2 else int(random.integers(2, 12)))  # each at a time of its own
    if key == "group":
        rows = [{**row, "group": f"{row['label']}{random.integers(0, 4)}"} for row in rows]
    config = table(tmp_path, rows, split={"time": share} if key == "time" else "images", validation_fraction=0)
    tested: set[str] = set()
    for label in {row["label"] for row in rows}:
        own = [row for row in rows if row["label"] == label]
        units = list(dict.fromkeys(row[key] for row in own))
        units = sorted(units) if key == "time" else units
        own.sort(key=lambda row: units.index(row[key]))
        cuts = [place for place in range(1, len(own)) if own[place - 1][key] != own[place][key]]
        wanted = len(own) - max(1, int(len(own) * (1 - share) + 0.5 + 1e-9))
        if cuts:
            tested |= {row["path"] for row in own[min(cuts, key=lambda cut: abs(cut - wanted)) :]}
    everything = {row["path"] for row in rows}
    assert parts_of(config, "test", "train", "all") == [tested, everything - tested, everything]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("fraction", [0.1, 0.3])
def test_validation_images_are_training_images_of_classes_that_keep_two(seed: int, fraction: float, tmp_path: Path):
    rows = random_rows(seed)
    config = table(tmp_path, rows, split={"time": 0.8}, validation_fraction=fraction)
    plain = table(tmp_path, rows, split={"time": 0.8}, validation_fraction=0)
    train, validation, test = parts_of(config, *SPLITS)
    assert [test, train | validation] == parts_of(plain, "test", "train")
    assert not train & validation and validation
    of = {row["path"]: row for row in rows}
    able = 0
    for label in {row["label"] for row in rows}:
        kept, held = ([of[name] for name in part if of[name]["label"] == label] for part in (train, validation))
        able += (len(kept) + len(held)) * (len(kept) + len(held) > 2)
        if held:  # the last of the training part
            assert len(kept) >= 2 and max(row["time"] for row in kept) < min(row["time"] for row in held)
    assert abs(len(validation) - fraction * able) < 1 or fraction > 0.2  # a class of three gives at most one


def test_each_split_is_searched_in_those_before_it(tmp_path: Path):
    config = table(tmp_path, random_rows(0), split="images", validation_fraction=0.2)
    parts = {split: names_of(config, split) for split in SPLITS}
    for split, gallery in (("validation", parts["train"]), ("test", parts["train"] | parts["validation"])):
        images = config.searched(split)
        assert images.query is not None and images.gallery is not None
        names = np.array([Path(path).name for path in images.paths])
        assert set(names[images.query.numpy()]) == parts[split] and set(names[images.gallery.numpy()]) == gallery
        assert config.build(split).query is None  # the images of a split alone
    assert config.searched("train").query is None and names_of(config, "train") == parts["train"]


def test_the_splits_of_the_data_are_used_where_they_share_classes(tmp_path: Path):
    rows = [
        {"path": f"{label}{number}.jpg", "label": label, "split": split}
        for label in "abcd"
        for number, split in enumerate(["train", "train", "train", "validation", "test"])
        if (label, split) not in (("c", "train"), ("d", "test"))
    ]
    config = table(tmp_path, rows, split="images")
    for split in SPLITS:
        assert names_of(config, split) == {row["path"] for row in rows if row["split"] == split}
    for label in "ab":
        for split, count in (("train", 3), ("test", 1)):
            trees.photos(tmp_path / "photos" / split / label, (f"{number}.jpg" for number in range(count)))
    folder = FolderConfig(root=str(tmp_path / "photos"), split="images", validation_fraction=0.34)
    sizes = {split: len(folder.build(split)) for split in SPLITS}
    assert sizes == {"train": 4, "validation": 2, "test": 2}


def test_images_without_a_time_are_in_no_split_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    warn_once.cache_clear()
    rows = random_rows(1)
    lost = [row["path"] for row in rows[:7]]
    rows = [{**row, "time": "" if row["path"] in lost else row["time"]} for row in rows]
    config = table(tmp_path, rows, split={"time": 0.8})
    assert set(lost).isdisjoint(set[str]().union(*(names_of(config, split) for split in SPLITS)))
    assert f"photos.csv: 7 images have no time and are left out of all splits: {', '.join(lost[:5])}" in caplog.text
    assert "a single time, which is trained on and searched, not tested: " in caplog.text
    none = table(tmp_path, [{**row, "time": ""} for row in rows], split={"time": 0.8})
    with pytest.raises(OptionError, match=r"dataset\.split: .*no image has a time"):
        none.build("train")
    wrong = table(tmp_path, [*rows, {**rows[0], "path": "x.jpg", "time": "summer"}], split={"time": 0.8})
    refuses(r"x\.jpg: time: got 'summer', expected a date", wrong.build, "train")


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        ({}, {"split": "images", "separator": "|"}, "split images does not support a separator"),
        ({"query": "true", "gallery": "true"}, {"split": "images"}, "does not support separate query and gallery"),
        ({}, {"split": "images", "new_classes": "test"}, "new_classes cannot be test"),
    ],
)
def test_what_known_classes_exclude(columns: dict[str, str], options: dict, message: str, tmp_path: Path):
    with pytest.raises((UserError, ValueError), match=message):
        table(tmp_path, [{**row, **columns} for row in random_rows(0)], **options).build("train")


def test_two_images_of_each_class_leave_none_for_validation(tmp_path: Path):
    rows = [{"path": f"{label}{number}.jpg", "label": label} for label in "abcdef" for number in range(3)]
    config = table(tmp_path, rows, split="images")
    with pytest.raises(OptionError, match="holds out none for validation, because two of each class remain; use 0"):
        config.build("train")
    assert len(config.model_copy(update={"validation_fraction": 0.0}).build("train")) == 12


def run_of(config: DatasetConfig) -> SplitClasses:
    """What a run that starts now remembers."""
    names = {split: config.build(split).class_names for split in SPLITS}
    return SplitClasses("run", names, images=config.known_images())


@pytest.mark.parametrize("split", ["images", {"time": 0.8}])
def test_a_run_keeps_to_the_images_of_its_splits(split: object, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """Photos that come first in the order, or are older, would move the last fifth into what was trained on."""
    warn_once.cache_clear()
    rows = random_rows(5)
    rows[3] = {**rows[3], "time": ""}  # in no split by time, also later
    config = table(tmp_path, rows, split=split)
    before = {part: names_of(config, part) for part in SPLITS}
    own, gone = run_of(config), rows[0]["path"]
    older = [{"path": f"new{number}.jpg", "label": rows[0]["label"], "time": "1990-01-01"} for number in range(40)]
    stranger = {"path": "stranger.jpg", "label": "a_new_one", "time": "1990-01-01"}
    grown = table(tmp_path, [*older, stranger, *rows[1:]], split=split)
    moved = names_of(grown, "test") & (before["train"] | before["validation"])
    assert moved or split != "images"  # by the rule alone
    kept = grown.of_run(own)
    for part in SPLITS:
        assert names_of(kept, part) == before[part] - {gone}
    count, why = (42, "new or without a time") if isinstance(split, dict) else (41, "new since")
    assert f"{count} images are in no split of run, {why}, and left out: new0.jpg" in caplog.text
    assert f"lacks 1 of the {sum(map(len, before.values()))} images of run: {gone}" in caplog.text
    images = kept.searched("test")
    assert int(images.gallery.sum()) == len((before["train"] | before["validation"]) - {gone})
    again = kept.known_images()
    assert again is not None and own.images is not None
    assert again == {part: tuple(name for name in own.images[part] if name != gone) for part in SPLITS}


def test_other_data_are_divided_by_their_own_rule_with_a_word(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    warn_once.cache_clear()
    own = run_of(table(tmp_path, random_rows(0), split="images"))
    rows = [{**row, "path": f"other{row['path']}"} for row in random_rows(0)]
    other = table(tmp_path, rows, split="images")
    assert names_of(other.of_run(own), "test") == names_of(other, "test")
    assert "has none of the images of run, and is divided by its own rule" in caplog.text
    unseen = table(tmp_path, random_rows(0)).of_run(own)
    with pytest.raises(OptionError, match="got official, but run was trained to test known classes"):
        unseen.build("test")
