"""Every reader with every kind of bad input: a line each, and no row that is misread in silence."""

import csv
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pytest
from pyarrow import parquet

from dmlkit.datasets.files.boxes import Boxes
from dmlkit.errors import UserError
from dmlkit.files.image_file import BadImageError
from dmlkit.vectors.images import images_at
from tests.datasets import trees
from tests.datasets.test_readers import DEPLOYMENTS, voc, workbook, write

SIDES = ("x1", "y1", "x2", "y2")


class Row(NamedTuple):
    """What a reader is to read; the images have 24 x 18 pixels."""

    path: str
    label: str
    box: tuple[float, float, float, float] = (2, 3, 12, 15)


ROWS = [Row("cam1/a.jpg", "fox"), Row("cam1/b.jpg", "owl"), Row("cam2/a.jpg", "fox"), Row("cam2/c.jpg", "owl")]
Written = tuple[Path, bool]
"""The file, and whether it has boxes of images that are given besides it."""


def cells(rows: Sequence[Row]) -> dict[str, list[Any]]:
    named = {"path": [row.path for row in rows], "label": [row.label for row in rows]}
    return named | {side: [float(row.box[place]) for row in rows] for place, side in enumerate(SIDES)}


def table(suffix: str) -> Callable[[Path, Sequence[Row]], Written]:
    def written(home: Path, rows: Sequence[Row]) -> Written:
        columns, file = cells(rows), home / f"t{suffix}"
        lines = [list(columns), *map(list, zip(*columns.values(), strict=True))]
        entries = [dict(zip(columns, line, strict=True)) for line in lines[1:]]
        if suffix in (".csv", ".tsv"):
            with file.open("w", newline="") as opened:
                csv.writer(opened, delimiter={".csv": ",", ".tsv": "\t"}[suffix]).writerows(lines)
        elif suffix == ".xlsx":
            workbook(file, ("rows", lines))
        elif suffix == ".parquet":
            parquet.write_table(pa.table(columns), file)
        elif suffix == ".arrow":
            with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_file(sink, pa.table(columns).schema) as writer:
                writer.write_table(pa.table(columns))
        else:
            write(file, entries if suffix == ".json" else "\n".join(map(json.dumps, entries)))
        return file, False

    return written


def image_folder(home: Path, rows: Sequence[Row]) -> Written:
    file, _ = table(".csv")(home, rows)
    return file.rename(home / "metadata.csv"), False


def shares(row: Row) -> list[float]:
    left, top, right, bottom = row.box
    return [left / 24, top / 18, (right - left) / 24, (bottom - top) / 18]


def coco(home: Path, rows: Sequence[Row]) -> Written:
    numbers = {path: number for number, path in enumerate(dict.fromkeys(row.path for row in rows))}
    labels = {label: number for number, label in enumerate(dict.fromkeys(row.label for row in rows))}
    annotations = [
        {
            "image_id": numbers[row.path],
            "category_id": labels[row.label],
            "bbox": [*row.box[:2], row.box[2] - row.box[0], row.box[3] - row.box[1]],
        }
        for row in rows
    ]
    images = [{"id": number, "file_name": path} for path, number in numbers.items()]
    categories = [{"id": number, "name": label} for label, number in labels.items()]
    return write(home / "c.json", {"images": images, "annotations": annotations, "categories": categories}), False


def megadetector(home: Path, rows: Sequence[Row], image: str = "file") -> Written:
    images = [{image: row.path, "detections": [{"category": "1", "conf": 0.9, "bbox": shares(row)}]} for row in rows]
    if image == "filepath":
        return write(home / "sn.json", {"predictions": images}), True
    return write(home / "md.json", {"images": images, "detection_categories": {"1": "animal"}}), True


def speciesnet(home: Path, rows: Sequence[Row]) -> Written:
    return megadetector(home, rows, "filepath")


def yolo_lines(rows: Sequence[Row], labels: Sequence[str]) -> str:
    lines = list[str]()
    for row in rows:
        left, top, width, height = shares(row)
        center = (left + width / 2, top + height / 2, width, height)
        lines.append(" ".join(map(str, (labels.index(row.label), *center))))
    return "\n".join(lines)


def yolo(home: Path, rows: Sequence[Row]) -> Written:
    for path in {row.path for row in rows}:
        of_image = [row for row in rows if row.path == path]
        write(home / "labels" / Path(path).with_suffix(".txt"), yolo_lines(of_image, ["fox", "owl"]))
    return home / "labels", True


def yolo_dataset(home: Path, rows: Sequence[Row]) -> Written:
    (home / "images").mkdir()
    for name in ("cam1", "cam2"):
        (home / name).rename(home / "images" / name)
    yolo(home, rows)
    return write(home / "data.yaml", "train: images\nnames: [fox, owl]\n"), False


def pascal(home: Path, rows: Sequence[Row]) -> Written:
    for path in {row.path for row in rows}:
        objects = [(row.label, *row.box) for row in rows if row.path == path]
        name = Path(path).with_suffix(".xml").as_posix().replace("/", "-")
        write(home / "Annotations" / name, voc(name.replace(".xml", ".jpg"), *objects))
    (home / "JPEGImages").mkdir()
    for photo in home.glob("cam*/*.jpg"):
        photo.rename(home / "JPEGImages" / f"{photo.parent.name}-{photo.name}")
    return home / "Annotations", False


def camtrap(home: Path, rows: Sequence[Row]) -> Written:
    media = {path: f"m{number}" for number, path in enumerate(dict.fromkeys(row.path for row in rows))}
    lines = [f"{one},d1,2020-05-30T04:57:37Z,{path}" for path, one in media.items()]
    write(home / "media.csv", "\n".join(["mediaID,deploymentID,timestamp,filePath", *lines]))
    head = "mediaID,deploymentID,observationType,individualID,bboxX,bboxY,bboxWidth,bboxHeight"
    lines = [",".join([media[row.path], "d1", "animal", row.label, *map(str, shares(row))]) for row in rows]
    write(home / "deployments.csv", DEPLOYMENTS)
    return write(home / "observations.csv", "\n".join([head, *lines])), False


WRITERS: dict[str, Callable[[Path, Sequence[Row]], Written]] = {
    **{suffix: table(suffix) for suffix in (".csv", ".tsv", ".jsonl", ".json", ".xlsx", ".parquet", ".arrow")},
    **{
        one.__name__: one for one in (image_folder, coco, megadetector, speciesnet, yolo, yolo_dataset, pascal, camtrap)
    },
}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    for number, row in enumerate(ROWS):
        trees.photo(tmp_path / row.path, number)
    return tmp_path


def read(written: Written, home: Path) -> Any:
    file, has_images = written
    if file.name == "metadata.csv":
        file = home
    return images_at(home, boxes=Boxes(file)) if has_images else images_at(file)


LAST = ROWS[3]
ROW_DAMAGES: dict[str, tuple[list[Row], str]] = {
    "outside": ([*ROWS[:3], LAST._replace(box=(100, 100, 140, 150))], "is not inside the 24 x 18 image"),
    "two labels": ([*ROWS, ROWS[0]._replace(label="owl")], "is already listed in|1 image of several individuals"),
    "absent": ([*ROWS[:3], Row("cam2/z.jpg", "owl")], "z.jpg: cannot read this image: file not found|left out: 1 "),
    "leaves its root": ([*ROWS[:3], Row("../z.jpg", "owl")], "path '../z.jpg' leads out of the root"),
    "swapped": ([Row(row.label, row.path) for row in ROWS], "fox is already listed in|lists no images|no boxes of"),
}
BY_NAMES = ("yolo", "yolo_dataset", "pascal")
"""Readers of files that have the names of their images, which lead nowhere else and cannot be swapped."""
ALIKE = (".tsv", ".json", ".arrow")
"""Tables that are one, once they are read, with .csv, .jsonl and .parquet."""
WRONG_ROWS = [
    (kind, damage)
    for kind in WRITERS
    for damage in ROW_DAMAGES
    if kind not in ALIKE and not (kind in BY_NAMES and damage in ("leaves its root", "swapped"))
]


@pytest.mark.parametrize(("kind", "damage"), WRONG_ROWS)
def test_a_wrong_row_is_one_line(kind: str, damage: str, home: Path, caplog: pytest.LogCaptureFixture):
    rows, message = ROW_DAMAGES[damage]
    written, said = WRITERS[kind](home, rows), list[str]()
    try:
        images = read(written, home)
        assert len(images) < len(rows) or damage == "absent"
        for row in range(len(images)):
            images.sample(row)
    except (UserError, BadImageError) as error:
        said = str(error).splitlines()
    assert re.search(message, "\n".join([*said, caplog.text])), (said, caplog.text)
    assert len(said) <= (3 if damage == "swapped" else 1) and all(len(line) < 600 for line in said)


@pytest.mark.parametrize(("start", "border", "cut"), [(16, 15, (15, 24)), (-6, -1, (0, 9))], ids=["right", "left"])
@pytest.mark.parametrize("kind", [".csv", "coco", "megadetector", "yolo"])
def test_boxes_outside_of_their_images_are_refused_alike(kind, start, border, cut, home: Path):
    """Even if other boxes are good: one line with the first box, the places of the others, and what to do."""

    def written(*lefts: int) -> tuple[Path, Boxes]:
        boxes = [Row("cam1/a.jpg", "fox", (left, 0, left + 10, 10)) for left in lefts]
        file, has_images = WRITERS[kind](home, [Row("cam1/b.jpg", "fox", (0, 0, 9, 9)), *boxes])
        return (home, Boxes(file)) if has_images else (file, Boxes())

    source, boxes = written(*range(start, start + 5))
    with pytest.raises(UserError) as raised:
        images_at(source, boxes=boxes)
    (line,) = str(raised.value).splitlines()
    assert str(boxes.source or source) in line
    assert line.endswith("; correct such entries, or skip them with --skip-bad-images")
    wrong = f"({start}, 0, {start + 10}, 10) of {home / 'cam1/a.jpg'} is not inside the 24 x 18 image"
    assert f"the box {wrong}; 4 more of this kind: " in line
    assert line.partition("kind: ")[2].count(", ") == 3 + 1  # before what to do
    dataset = images_at(source, boxes=boxes._replace(skips=True))
    assert len(dataset) == 1 and len(dataset.left_out) == 5 and wrong in dataset.left_out[0]
    source, boxes = written(border)  # 1 pixel is rounding: the box is cut
    dataset = images_at(source, boxes=boxes)
    sides = [dataset.box(row)[:4] for row, path in enumerate(dataset.paths) if path.endswith("a.jpg")]
    assert [tuple(map(round, box)) for box in sides] == [(cut[0], 0, cut[1], 10)]


@pytest.mark.parametrize("damage", ["truncated", "empty", "of another encoding"])
@pytest.mark.parametrize("kind", WRITERS)
def test_a_damaged_file_is_one_line(kind: str, damage: str, home: Path, caplog: pytest.LogCaptureFixture):
    written = WRITERS[kind](home, ROWS)
    folder = home / "labels" if kind.startswith("yolo") else written[0]
    file = folder if folder.is_file() else min(path for path in folder.rglob("*") if path.is_file())
    content = file.read_bytes()
    damages = {"truncated": content[: len(content) * 2 // 3], "empty": b""}
    file.write_bytes(damages.get(damage, b"\x81\xfe\x00\xff" * 50))
    try:
        images = read(written, home)
    except UserError as error:
        assert str(file) in str(error) and "\n" not in str(error)
    else:  # an image without boxes
        assert damage == "empty" and kind.startswith("yolo") and len(images) == 3
        assert re.search(r"left out: 1 image .*without (a box|boxes)", caplog.text)


def test_whole_lists_are_read(home: Path):
    """The writers above, without damage: what the damages are compared with."""
    for number, (kind, writer) in enumerate(WRITERS.items()):
        place = home / str(number)
        for row in ROWS:
            trees.photo(place / row.path, 0)
        images = read(writer(place, ROWS), place)
        assert len(images) == 4 and images.boxes is not None
        assert {tuple(box) for box in images.boxes.round(3).tolist()} == {ROWS[0].box}, kind
