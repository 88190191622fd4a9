"""Times and places in EXIF data: written by hand, in several formats, and broken in the ways of cameras."""

from collections.abc import Sequence
from math import isclose
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import ExifTags, Image
from PIL.TiffImagePlugin import IFDRational

from dmlkit.datasets import FolderConfig, TableConfig
from dmlkit.datasets.base import SPLITS
from dmlkit.errors import OptionError, warn_once
from dmlkit.evaluation.by_value import column_table, dated, read_column
from dmlkit.files import exif
from dmlkit.files.columns import SightingCells, in_days, time_of
from dmlkit.files.exif import exif_sightings
from dmlkit.files.image_file import Box
from dmlkit.loading.check import dataset_at
from tests.conftest import refuses
from tests.datasets import trees

ORIGINAL, DIGITIZED, FRACTION, ZONE = 36867, 36868, 37521, 36881
PLACE = {1: "N", 2: (47.0, 30.0, 36.0), 3: "W", 4: (8.0, 15.0, 0.0)}


def photo(path: Path, tags: dict[int, Any], place: dict[int, Any] | None = None, seed: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = Image.Exif()
    data[ExifTags.IFD.Exif], data[ExifTags.IFD.GPSInfo] = tags, place or {}
    pixels = np.random.default_rng(seed).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path, exif=data)
    return path


@pytest.mark.parametrize("suffix", [".jpg", ".png", ".webp"])
def test_time_and_place_of_a_photo(suffix: str, tmp_path: Path):
    path = photo(tmp_path / f"a{suffix}", {ORIGINAL: "2026:05:31 14:30:00", FRACTION: "25", ZONE: "+02:00"}, PLACE)
    (seen,) = exif_sightings([str(path)])
    assert seen.time == "2026-05-31T14:30:00.25+02:00"
    assert isclose(in_days(time_of(seen.time, "")), in_days(time_of("2026-05-31T12:30:00.25", "")))
    assert seen.latitude is not None and isclose(float(seen.latitude), 47.51)
    assert seen.longitude is not None and isclose(float(seen.longitude), -8.25)


@pytest.mark.parametrize(
    ("tags", "time"),
    [
        ({ORIGINAL: "0000:00:00 00:00:00"}, None),
        ({ORIGINAL: "    :  :     :  :  "}, None),
        ({ORIGINAL: "2026:13:40 25:00:00"}, None),
        ({ORIGINAL: "2026:05:31 14:30:00\0"}, "2026-05-31T14:30:00"),
        ({ORIGINAL: "2026-05-31 14:30:00", ZONE: "local"}, "2026-05-31T14:30:00"),
        ({ORIGINAL: "2026:05:31 14:30:00", ZONE: "+99:00", FRACTION: "x"}, None),
        ({ORIGINAL: "0000:00:00 00:00:00", DIGITIZED: "2026:05:31 14:30:00"}, "2026-05-31T14:30:00"),
    ],
)
def test_broken_times_are_unknown(tags: dict[int, Any], time: str | None, tmp_path: Path):
    (seen,) = exif_sightings([str(photo(tmp_path / "a.jpg", tags))])
    assert seen.time == time and seen.latitude is None


@pytest.mark.parametrize(
    "place",
    [
        {2: (IFDRational(47, 0), IFDRational(0, 0), IFDRational(0, 0))},  # a receiver without a fix
        {2: (0.0, 0.0, 0.0), 4: (0.0, 0.0, 0.0)},
        {2: (91.0, 0.0, 0.0)},
        {4: (8.0, 15.0)},
        {4: None},
    ],
)
def test_broken_places_are_unknown(place: dict[int, Any], tmp_path: Path):
    whole = {tag: value for tag, value in (PLACE | place).items() if value is not None}
    (seen,) = exif_sightings([str(photo(tmp_path / "a.jpg", {}, whole))])
    assert seen == SightingCells()


def test_files_without_a_header_are_unknown(tmp_path: Path):
    (tmp_path / "torn.jpg").write_bytes(photo(tmp_path / "a.jpg", {ORIGINAL: "2026:05:31 14:30:00"}).read_bytes()[:30])
    (tmp_path / "text.jpg").write_text("no photo")
    trees.photo(tmp_path / "plain.jpg", 0)
    names = [str(tmp_path / name) for name in ("torn.jpg", "text.jpg", "absent.jpg", "plain.jpg")]
    assert exif_sightings(names) == [SightingCells()] * 4


@pytest.mark.filterwarnings("error")
def test_random_bytes_in_a_header_are_no_traceback(tmp_path: Path):
    content = photo(tmp_path / "a.jpg", {ORIGINAL: "2026:05:31 14:30:00", ZONE: "+02:00"}, PLACE).read_bytes()
    end, random, paths = content.index(b"\xff\xdb"), np.random.default_rng(0), list[str]()
    for number in range(200):
        changed = bytearray(content)
        for place in random.integers(20, end, 4):
            changed[place] = random.integers(256)
        paths.append(str(tmp_path / f"{number}.jpg"))
        Path(paths[-1]).write_bytes(changed)
    for seen in exif_sightings(paths):
        time_of(seen.time, "a photo")
        assert (seen.latitude is None) == (seen.longitude is None)
        assert seen.latitude is None or abs(float(seen.latitude)) <= 90
        assert seen.longitude is None or abs(float(seen.longitude)) <= 180


def folder_of(root: Path, days: dict[str, Sequence[str]]) -> Path:
    """Photos of individuals, each at noon of a day; an empty one has no time."""
    for label, own in days.items():
        for number, day in enumerate(own):
            tags = {ORIGINAL: f"{day.replace('-', ':')} 12:{number:02}:00"} if day else {}
            photo(root / label / f"{number}.jpg", tags, seed=hash((label, number)) % 1000)
    return root


STEPS = {"a": 1, "b": 2, "c": 4, "d": 5}
DAYS = {label: [f"2026-0{(number * step) % 9 + 1}-11" for number in range(5)] for label, step in STEPS.items()}


def names(config: FolderConfig | TableConfig, split: Any) -> set[str]:
    return {str(Path(path).parent.name + Path(path).stem) for path in config.build(split).paths}


def test_a_split_by_time_reads_the_photos_of_a_folder_and_of_a_table_without_times_or_with_empty_cells(tmp_path: Path):
    root = folder_of(tmp_path / "photos", DAYS)
    rows = [f"photos/{label}/{number}.jpg,{label}" for label, own in DAYS.items() for number in range(len(own))]
    (tmp_path / "plain.csv").write_text("\n".join(["path,label", *rows]))
    timed = [f"{row},{'2027-01-01' if row.startswith('photos/a/0') else ''}" for row in rows]
    (tmp_path / "timed.csv").write_text("\n".join(["path,label,time", *timed]))
    last = {f"{label}{max(range(5), key=own.__getitem__)}" for label, own in DAYS.items()}
    of_folder = FolderConfig(root=str(root), split={"time": 0.8}, validation_fraction=0)
    assert names(of_folder, "test") == last
    for file, tested in (("plain.csv", last), ("timed.csv", {one for one in last if one[0] != "a"} | {"a0"})):
        config = TableConfig(file=str(tmp_path / file), split={"time": 0.8}, validation_fraction=0)
        assert names(config, "test") == tested


def test_the_photos_of_one_individual_and_day_are_a_group(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    warn_once.cache_clear()
    days = {label: ["2026-05-01", "2026-05-01", "2026-05-02", "2026-05-02", ""] for label in "abcd"}
    root = folder_of(tmp_path / "photos", days)
    config = FolderConfig(root=str(root), group="day", validation_fraction=0)
    images = config.build("all")
    assert images.groups is not None
    keys = [(label, day or f"{label}{number}") for label, own in days.items() for number, day in enumerate(own)]
    expected = [[key == two for two in keys] for key in keys]
    assert (images.groups[:, None] == images.groups).tolist() == expected
    assert "photos: 4 images have no time, each of which is a group of its own: a/4.jpg, b/4.jpg" in caplog.text
    by_time = config.model_copy(update={"split": {"time": 0.8}})
    assert names(by_time, "test") == {f"{label}{number}" for label in days for number in (2, 3)}  # whole days


def test_nobody_reads_headers_for_a_split_that_needs_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    root = folder_of(tmp_path / "photos", DAYS)
    read: list[str] = []
    monkeypatch.setattr(exif, "_sighting", lambda path: read.append(path) or SightingCells())
    for split in SPLITS:
        FolderConfig(root=str(root), split="images", validation_fraction=0.2).build(split)
    assert not read
    with pytest.raises(OptionError, match="no image has a time; expected a column time of a table, or EXIF data"):
        FolderConfig(root=str(root), split={"time": 0.8}).build("train")
    assert len(read) == 20


def test_times_are_days_months_or_years_for_by():
    hours = [f"2026-{month:02}-{day:02}T{hour:02}:00" for month in (5, 6) for day in (1, 2) for hour in range(10)]
    assert set(dated(hours)) == {time[:10] for time in hours}
    days = [f"20{year}-{month:02}-{day:02}" for year in (24, 25) for month in range(1, 13) for day in (1, 9, 20)]
    assert set(dated(days)) == {day[:7] for day in days}
    many = [f"20{year}-{month:02}-01 10:00:00" for year in range(10, 20) for month in range(1, 13)]
    assert set(dated([*many, None])) == {*(month[:4] for month in many), None}
    words = [f"word {number}" for number in range(40)]
    assert list(dated(words)) == words


def test_by_time_of_a_folder_and_of_boxes(tmp_path: Path):
    days = ["", *(f"2026-05-{number:02}" for number in range(1, 9))]
    root = folder_of(tmp_path / "photos", {"a": days})
    keys = [f"{root}/a/{number}.jpg" for number in range(9)]
    boxed = [f"{key} {Box(0, 1.5, 8, 9, 0.1).text}" for key in keys]
    expected = [None, *(f"{day}T12:{number:02}:00" for number, day in enumerate(days) if day)]
    for images in (keys, boxed):
        assert read_column(images, None, "time") == expected
    folder = {"name": "folder", "root": str(tmp_path / "photos")}
    assert column_table("time", None, folder) is None
    refuses("the dataset of the run is folder, which has no columns", column_table, "camera", None, folder)


def test_column_group_day_of_a_folder_and_of_tables(tmp_path: Path):
    root = folder_of(tmp_path / "photos", DAYS)
    (tmp_path / "plain.csv").write_text("path,label\nphotos/a/0.jpg,a\n")
    (tmp_path / "own.csv").write_text("path,label,day\nphotos/a/0.jpg,a,monday\n")
    for source in (root, tmp_path / "plain.csv"):
        assert dataset_at(source, columns={"group": "day"}).group == "day"
    own = dataset_at(tmp_path / "own.csv", columns={"group": "day"})
    assert own.group is None and isinstance(own, TableConfig) and own.columns == {"group": "day"}


@pytest.mark.parametrize(
    ("head", "columns"),
    [
        ("datei,art", {"path": "datei", "label": "art"}),
        ("path,class,name", {"label": "class"}),
        ("path,art,note", {"label": "/(?P<label>[a-z])/"}),
    ],
)
def test_group_day_of_a_table_with_other_names_of_columns(head: str, columns: dict[str, str], tmp_path: Path):
    folder_of(tmp_path / "photos", DAYS)
    row = ",".join(["photos/a/0.jpg", "a", "x"][: head.count(",") + 1])
    (tmp_path / "t.csv").write_text(f"{head}\n{row}\n")
    config = dataset_at(tmp_path / "t.csv", columns=columns | {"group": "day"})
    assert config.group == "day" and config.build("all").class_names == ("a",)
