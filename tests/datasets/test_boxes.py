"""Boxes of YOLO, COCO, MegaDetector and tables: each crop against Pillow's, and each mistake in one line."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dmlkit.datasets.files.boxes import Boxes
from dmlkit.datasets.files.dataset import Dataset
from dmlkit.datasets.files.image import thumbnail
from dmlkit.errors import UserError
from dmlkit.files.image_file import Box
from dmlkit.gallery.images import LabelledImage, images_of
from dmlkit.vectors.images import images_at
from tests.conftest import one_line, refuses


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Two images of noise without losses; the second is stored turned by 90 degrees."""
    folder = tmp_path / "photos"
    (folder / "deer").mkdir(parents=True)
    noise = np.random.default_rng(0).integers(0, 256, (30, 40, 3), dtype=np.uint8)
    Image.fromarray(noise).save(folder / "a.png")
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(noise.transpose(1, 0, 2)[::-1].copy()).save(folder / "deer" / "b.png", exif=exif)  # 30 x 40 pixels
    return folder


def upright(path: str) -> Image.Image:
    image = Image.open(path)
    return image.transpose(Image.Transpose.ROTATE_270) if path.endswith("b.png") else image


def crops(dataset: Dataset) -> list[tuple[str, str | None, tuple[int, ...]]]:
    """Name, label and sides of each sample, which must be Pillow's crop of these sides."""
    found = list[tuple[str, str | None, tuple[int, ...]]]()
    for row, label in enumerate(dataset.label_names(dataset.labels)):
        box = dataset.box(row)
        sides = tuple(round(side) for side in box[:4])
        expected = np.asarray(upright(dataset.paths[row]).crop(sides))
        assert np.array_equal(dataset.sample(row).permute(1, 2, 0).numpy(), expected)
        found.append((Path(dataset.paths[row]).name, label, sides))
    return found


def yolo(folder: Path, **lines: str) -> Path:
    for name, text in lines.items():
        file = folder / {"a": "a.txt", "b": "deer/b.txt", "c": "c.txt"}[name]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder


def write(path: Path, data: object) -> Path:
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


def test_yolo(photos: Path, tmp_path: Path):
    """Center and size as shares, and a confidence; names are those of the images, also in subfolders."""
    lines = "0 0.5 0.5 0.25 0.2\n2 0.25 0.5 0.5 1 0.9\n1 0.5 0.5 1 1 0.1\n"
    labels = yolo(tmp_path / "labels", a=lines, b="0 .5 .5 .5 .5\n")
    (labels / "classes.txt").write_text("deer\nfox\n")
    found = crops(images_at(photos, boxes=Boxes(labels)))
    # 40 x 30: 10 x 6 around (20, 15); the left half; upright 40 x 30 too: 20 x 15 around (20, 15)
    assert found == [
        ("a.png", None, (15, 12, 25, 18)),
        ("a.png", None, (0, 0, 20, 30)),
        ("b.png", "deer", (10, 8, 30, 22)),
    ]
    assert len(images_at(photos, boxes=Boxes(labels, confidence=0.05))) == 4
    assert crops(images_at(photos / "a.png", boxes=Boxes(yolo(tmp_path / "one", a="0 0.5 0.5 0.25 0.2")))) == found[:1]
    assert images_at(photos, "none", Boxes(labels)).labels.tolist() == [-1, -1, -1]


COCO = {
    "images": [{"id": 7, "file_name": "deer/b.png", "width": 1}, {"id": 9, "file_name": "a.png"}],
    "categories": [{"id": 1, "name": "fox"}],
    "annotations": [
        {"id": 1, "image_id": 9, "bbox": [3, 4, 10, 12.4], "category_id": 1, "iscrowd": 0},
        {"id": 2, "image_id": 7, "bbox": [0, 0, 40.3, 30], "category_id": 5},
        {"id": 3, "image_id": 7, "category_id": 1},
    ],
}


def test_coco(photos: Path, tmp_path: Path):
    """Left, top and size in pixels; categories are labels, before folders."""
    file = write(tmp_path / "boxes.json", COCO)
    found = [("a.png", "fox", (3, 4, 13, 16)), ("b.png", "deer", (0, 0, 40, 30))]
    assert crops(images_at(photos, boxes=Boxes(file))) == found
    assert crops(images_at(photos / "a.png", boxes=Boxes(file))) == found[:1]


def test_boxes_of_many_other_images_are_found(photos: Path, tmp_path: Path):
    """None of which is in the folder; and a sample of their names has none of those that are."""
    labels = yolo(tmp_path / "labels", a="0 0.5 0.5 0.25 0.2", b="0 .5 .5 .5 .5")
    for name in ("0", "deer/z", *(f"deer/{number}" for number in range(50))):
        write(labels / f"{name}.txt", "0 0.5 0.5 0.5 0.5")
    found = crops(images_at(photos, boxes=Boxes(labels)))
    assert found == [("a.png", None, (15, 12, 25, 18)), ("b.png", "deer", (10, 8, 30, 22))]
    assert crops(images_at(photos / "a.png", boxes=Boxes(labels))) == found[:1]


@pytest.mark.parametrize(("folder", "others"), [("PHOTOS", ()), ("/mine", ("/mine/x.png", "/yours/x.png"))])
def test_boxes_of_other_paths(folder: str, others: tuple[str, ...], photos: Path, tmp_path: Path, monkeypatch, caplog):
    """Absolute ones, as MegaDetector writes them, of a folder named by a relative one, and of the folder elsewhere."""
    detections = [{"category": "1", "conf": 0.9, "bbox": [0.1, 0.2, 0.5, 0.5]}]
    folder = folder.replace("PHOTOS", str(photos))
    names = (f"{folder}/a.png", f"{folder}/deer/b.png", *others)  # which would both become x.png
    file = write(tmp_path / "md.json", {"images": [{"file": name, "detections": detections} for name in names]})
    monkeypatch.chdir(tmp_path)
    found = crops(images_at(Path("photos"), boxes=Boxes(file)))
    assert found == [("a.png", None, (4, 6, 24, 21)), ("b.png", "deer", (4, 6, 24, 21))]
    assert "without a box" not in caplog.text
    assert crops(images_at(Path("photos/a.png"), boxes=Boxes(file))) == found[:1]


def test_labels_of_boxes_are_parts_of_the_paths(photos: Path, tmp_path: Path):
    """A pattern goes before the folders, also where it has no label for an image."""
    detections = [{"category": "1", "conf": 0.9, "bbox": [0.1, 0.2, 0.5, 0.5]}]
    names = ("a.png", "deer/b.png")
    file = write(tmp_path / "md.json", {"images": [{"file": name, "detections": detections} for name in names]})
    for pattern, labels in (("(?P<label>[ab])[.]", ["a", "b"]), ("(?P<label>a)[.]", ["a", None])):
        options = Boxes(file, columns={"label": pattern})
        sides = (4, 6, 24, 21)
        expected = [(Path(name).name, label, sides) for name, label in zip(names, labels, strict=True)]
        assert crops(images_at(photos, boxes=options)) == expected
        assert images_at(photos, "none", options).labels.tolist() == [-1, -1]


def test_tables(photos: Path):
    table = write(photos / "t.csv", "path,label,x,y,width,height\na.png,fox,3,4,10,12\ndeer/b.png,deer,,,,\n")
    dataset = images_at(table)
    assert dataset.box(0) == Box(3, 4, 13, 16) and dataset.box(1) is None
    assert dataset.sample(0).shape == (3, 12, 10) and dataset.sample(1).shape == (3, 30, 40)
    widened = images_at(table, boxes=Boxes(margin=0.5))
    expected = np.asarray(upright(str(photos / "a.png")).crop((0, 0, 18, 22)))  # -2 and -2 end at the border
    assert np.array_equal(widened.sample(0).permute(1, 2, 0).numpy(), expected)


def test_a_margin_makes_another_image(photos: Path, tmp_path: Path):
    """Other pixels, another id in galleries and another key of embeddings, while no margin changes neither."""
    file = write(tmp_path / "boxes.json", COCO)
    tight, wide = (images_at(photos, boxes=Boxes(file, margin)) for margin in (0.0, 0.1))
    assert wide.sample(0).shape == (3, 15, 12)  # 10 x 12.4 from (3, 4): 2..14 and 3 (2.76)..18 (17.64)
    assert tight.key(0) == f"{photos / 'a.png'} (3.0, 4.0, 13.0, 16.4)" != wide.key(0)
    ids = [[image.id() for image in images_of(photos, None, Boxes(file, margin))[0]] for margin in (0.0, 0.1)]
    assert len({*ids[0], *ids[1]}) == 4
    image = LabelledImage(str(photos / "a.png"), None, Box(3.0, 4.0, 13.0, 16.4, 0.1))
    assert image.id() == ids[1][0]
    assert thumbnail(image.path, image.box)[:2] == b"\xff\xd8"


def with_bbox(*bbox: float) -> dict[str, object]:
    return {**COCO, "annotations": [{"image_id": 9, "bbox": bbox}]}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (with_bbox(5, 5, 0, 10), r"the box \(5, 5, 5, 15\) of .*a.png is empty"),
        (with_bbox(5, 5, 3), "annotations.0.bbox.3: field required"),
        (with_bbox(5, 5, 3, float("nan")), "annotations.0.bbox.3: input should be a finite number"),
        ({**COCO, "annotations": [{"image_id": 4, "bbox": [0, 0, 1, 1]}]}, "image_id 4 is not one of the images"),
        ({**COCO, "images": [{"id": 9, "file_name": "../z.png"}, {"id": 7, "file_name": "a.png"}]},
         "annotations.0: path '../z.png' leads out of the root .*photos; expected a file below it"),
        ({**COCO, "images": [{"id": 9, "file_name": "a.png"}, {"id": 9, "file_name": "b.png"}]},
         "images: id 9 is that of a.png and of b.png"),
        ({**COCO, "categories": [{"id": 1, "name": "fox"}, {"id": 1, "name": "owl"}]}, "is that of fox and of owl"),
        ({**COCO, "annotations": []}, "no boxes of .*photos; expected at least one"),
        ({**COCO, "annotations": [{"image_id": 7, "bbox": [0, 0, 1, 1], "score": 0.1}]},
         "no boxes of a confidence of at least 0.2; the surest of 1 has 0.1: lower --box-confidence"),
        ({"images": [{"file": "a.png", "detections": [{"category": "1", "conf": 2, "bbox": [0] * 4}]}]}, "0.conf"),
        ([{"image_id": 9, "bbox": [0, 0, 1, 1]}], "boxes.json: this is a file of COCO results.*; give COCO"),
        ("{", "cannot read this JSON file"),
        ("[" * 200_000, "cannot read this JSON file"),
    ],
)  # fmt: skip
def test_mistakes_of_json(photos: Path, tmp_path: Path, data: object, message: str):
    file = write(tmp_path / "boxes.json", data)
    with pytest.raises(UserError, match=message) as raised:
        images_at(photos, boxes=Boxes(file))
    assert "\n" not in str(raised.value) and "boxes.json" in str(raised.value)


def test_a_table_is_refused_for_the_place_of_its_box_but_not_for_an_image_that_is_missing(photos: Path):
    """A missing image is skipped by the command that reads it; a box that rounds to no pixels is refused."""
    head = "path,label,x1,y1,x2,y2\na.png,fox,-0.6,0,9,9\nz.png,fox,0,0,99,99\ndeer/b.png,fox,,,,\n"
    dataset = images_at(write(photos / "t.csv", head))
    assert [dataset.box(row) for row in range(3)] == [Box(0, 0, 9, 9), Box(0, 0, 99, 99), None]
    outside = "not inside the 40 x 30 image"
    for sides, reason in (("5,0,5.2,9", "empty; expected left < right"), ("0,0,9,32", outside), ("0,-2,9,9", outside)):
        table = write(photos / "t.csv", f"{head}deer/b.png,fox,{sides}\n")
        refuses(rf"t.csv:5: the box .* of .*b.png is {reason}.*; correct such entries", images_at, table)


def test_different_mistakes_are_in_one_message(photos: Path, tmp_path: Path):
    """Not only those of the first kind: an unknown image, a name outside, a box outside and a value that is no box."""
    annotations = [{"image_id": 4, "bbox": [0, 0, 1, 1]}, {"image_id": 9, "bbox": [35, 0, 10, 10]}]
    file = write(tmp_path / "boxes.json", {**COCO, "annotations": annotations})
    with pytest.raises(UserError, match=r"2 entries are wrong; correct them, or skip them .*:\n") as raised:
        images_at(photos, boxes=Boxes(file))
    assert "image_id 4 is not one" in str(raised.value) and "is not inside" in str(raised.value)
    labels = yolo(tmp_path / "labels", a="0 .5 .5\n0 1 1 1 1\n", b="x\n", c="0 .5 .5 1 1\n")
    with pytest.raises(UserError, match=r"3 entries are wrong; .*\n.*a.txt:1: got.*\n.*a.txt:2: the box"):
        images_at(photos, boxes=Boxes(labels))
    values = [{"image_id": [], "bbox": [0, 0, 1]}, {"image_id": 9, "bbox": [0, 0, 1, 1]}]
    with one_line(r"^[^\n]*annotations.0.image_id: .*got \[\]; correct such entries"):
        images_at(photos, boxes=Boxes(write(file, {**COCO, "annotations": values})))


def test_malformed_entries_are_left_out_and_counted(photos: Path, tmp_path: Path):
    """One line per entry, which names it by its place in the file; what is right is kept, also after it."""
    good = {"image_id": 9, "bbox": [3, 4, 10, 12.4], "category_id": 1}
    wrong = [{"image_id": [], "bbox": [0, "x", 1]}, None, 7, {**good, "score": 7.0}, {**good, "bbox": [99, 0, 1, 1]}]
    images = [{"id": 3}, *COCO["images"]]
    file = write(tmp_path / "boxes.json", {**COCO, "images": images, "annotations": [*wrong, good]})
    dataset = images_at(photos, boxes=Boxes(file, skips=True))
    assert crops(dataset) == [("a.png", "fox", (3, 4, 13, 16))]
    assert [line.split(": ")[1].partition(".")[0] for line in dataset.left_out] == ["images"] + ["annotations"] * 5
    for number, line in enumerate(dataset.left_out[1:]):
        assert f"annotations.{number}" in line
    assert "score: input should be less than or equal to 1, got 7.0" in dataset.left_out[4]


def test_a_text_of_two_images_is_of_neither(photos: Path, tmp_path: Path):
    Image.open(photos / "a.png").save(photos / "a.bmp")
    labels = yolo(tmp_path / "labels", a="0 0.5 0.5 1 1\n", b="0 .5 .5 1 1\n")
    refuses(r"'a' is of a.bmp and a.png; expected one image of this name", images_at, photos, boxes=Boxes(labels))
    dataset = images_at(photos, boxes=Boxes(labels, skips=True))
    assert crops(dataset) == [("b.png", "deer", (0, 0, 40, 30))] and len(dataset.left_out) == 1


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ({"a": "0 0.5 0.5 0.25\n"}, r"a.txt:1: got '0 0.5 0.5 0.25', expected class x y width height"),
        ({"a": "0 0.5 x 0.25 1\n"}, "a.txt:1: got"),
        ({"a": "0 0.5 0.5 nan 1\n"}, "a.txt:1: got"),
        ({"a": "0 0.5 0.5 1 1 0.9\n0 0.5 0.5 1 1 7\n"}, "a.txt:2: got the confidence 7, expected 0 to 1; if"),
        ({}, "has no text files"),
    ],
)
def test_mistakes_of_yolo(photos: Path, tmp_path: Path, lines: dict[str, str], message: str):
    (tmp_path / "labels").mkdir()
    refuses(message, images_at, photos, boxes=Boxes(yolo(tmp_path / "labels", **lines)))


def test_options_that_do_not_apply(photos: Path, tmp_path: Path):
    file = write(tmp_path / "boxes.json", COCO)
    table = write(photos / "t.csv", "path,label\na.png,fox\n")
    for source, boxes, message in (
        (photos, Boxes(margin=0.1), "has no boxes and no columns; name a file of boxes with --boxes"),
        (table, Boxes(margin=0.1), "has no boxes; name them with --boxes"),
        (table, Boxes(file), "is a table; give its folder of images"),
        (photos, Boxes(file, -0.1), "--box-margin -0.1: expected a share of the box"),
        (photos, Boxes(file, 0.1, 2), "--box-confidence 2: expected a number from 0 to 1"),
        (photos, Boxes(confidence=0.2), "has no boxes and no columns"),
        (photos, Boxes(tmp_path / "none.json"), "no such file or folder"),
        (photos, Boxes(photos), "photos: this folder has no text files; expected one per image"),
        (photos, Boxes(photos / "a.png"), "expected a table .*, or annotations of COCO"),
    ):
        refuses(message, images_at, source, boxes=boxes)
