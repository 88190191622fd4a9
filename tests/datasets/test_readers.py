"""Formats that list images, each compared with rows written by hand."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from dmlkit.datasets import TableConfig
from dmlkit.datasets.files.boxes import Boxes
from dmlkit.errors import UserError
from dmlkit.files.image_table import read_images
from dmlkit.files.readers.base import ImageTable, Reader, reader_of, table_of
from dmlkit.vectors.images import images_at
from tests.datasets import trees

SIDES = ("x1", "y1", "x2", "y2")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Four photos of 24 x 18 pixels, in folders of cameras."""
    for index, name in enumerate(("cam1/a.jpg", "cam1/b.jpg", "cam2/a.jpg", "cam2/c.jpg")):
        trees.photo(tmp_path / name, index)
    return tmp_path


def rows(file: Path, *names: str, **options: Any) -> list[list[Any]]:
    found = read_images(file, needs=("path",), **options)
    return [list(row) for row in zip(*(found.table[name].to_pylist() for name in names), strict=True)]


def write(path: Path, content: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".arrow", ".feather"])
def test_tables_of_other_formats(home: Path, suffix: str):
    cells = {"file_name": ["cam1/a.jpg", "cam2/c.jpg"], "identity": ["007", "fox"], "note": [None, "x"]}
    file = home / f"t{suffix}"
    if suffix == ".jsonl":
        lines = [dict(zip(cells, row, strict=True)) for row in zip(*cells.values(), strict=True)]
        file.write_text("\n".join(json.dumps({k: v for k, v in line.items() if v}) for line in lines))
    elif suffix == ".arrow":
        with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, pa.table(cells).schema) as writer:
            writer.write_table(pa.table(cells))
    else:
        with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_file(sink, pa.table(cells).schema) as writer:
            writer.write_table(pa.table(cells))
    columns = {"path": "file_name"}
    found = rows(file, "path", "label", "note", columns=columns)
    assert found == [["cam1/a.jpg", "007", None], ["cam2/c.jpg", "fox", "x"]]


@pytest.mark.parametrize("line", ["[1]", '{"path":', "7"])
def test_a_line_that_is_no_object_is_named(home: Path, line: str):
    with pytest.raises(UserError, match=r"t.jsonl:2: .*expected a JSON object") as raised:
        read_images(write(home / "t.jsonl", f'{{"path": "cam1/a.jpg"}}\n{line}\n'))
    assert "\n" not in str(raised.value)


def test_camera_traps_of_coco(home: Path, caplog: pytest.LogCaptureFixture):
    """Labels of whole images; the sequence is the group, and empty images are left out with their number."""
    names = ["cam1/a.jpg", "cam1/b.jpg", "cam2/a.jpg", "cam2/c.jpg"]
    images = [
        {"id": f"i{n}", "file_name": name, "seq_id": f"s{n // 2}", "datetime": "2011-05-13 23:43:18", "location": "x"}
        for n, name in enumerate(names)
    ]
    categories = [{"id": 0, "name": "empty"}, {"id": 1, "name": "fox"}]
    annotations = [{"id": n, "image_id": f"i{n}", "category_id": label} for n, label in enumerate([1, 0, 1])]
    file = write(home / "cct.json", {"images": images, "annotations": annotations, "categories": categories})
    assert rows(file, "path", "label", "group", "time", "location") == [
        ["cam1/a.jpg", "fox", "s0", "2011-05-13 23:43:18", "x"],
        ["cam2/a.jpg", "fox", "s1", "2011-05-13 23:43:18", "x"],
    ]
    assert len(images_at(file)) == 2
    assert f"{file}: left out: 1 image that is labeled empty, 1 image without annotations" in caplog.text


def test_polygons_and_attributes_of_coco(home: Path):
    annotation = {"image_id": 1, "category_id": 1, "segmentation": [[2, 3, 12, 3, 7, 15.5]], "name": "Amy"}
    data = {"images": [{"id": 1, "file_name": "cam1/a.jpg"}], "annotations": [annotation]}
    file = write(home / "c.json", data | {"categories": [{"id": 1, "name": "fox"}]})
    assert rows(file, "path", "label", *SIDES) == [["cam1/a.jpg", "fox", 2, 3, 12, 15.5]]
    assert rows(file, "label", columns={"label": "name"}) == [["Amy"]]


def test_an_annotation_without_a_category_has_no_label(home: Path):
    """Although a category has the id 0."""
    annotations = [{"image_id": 1, "bbox": [1, 2, 3, 4]}, {"image_id": 1, "category_id": 0, "bbox": [4, 3, 2, 1]}]
    data = {"images": [{"id": 1, "file_name": "cam1/a.jpg"}], "annotations": annotations}
    file = write(home / "c.json", data | {"categories": [{"id": 0, "name": "fox"}]})
    assert rows(file, "label") == [[None], ["fox"]]


def test_detectors(home: Path, caplog: pytest.LogCaptureFixture):
    """Boxes of animals in pixels of 24 x 18; what is left out has its number, and images that are absent too."""
    animal = {"category": "1", "conf": 0.9, "bbox": [0.25, 0.5, 0.5, 0.25], "classifications": [["0", 0.1], ["1", 0.8]]}
    images = [
        {"file": "cam1\\a.jpg", "datetime": "2024-02-01 03:04:05", "detections": [animal, {**animal, "category": "2"}]},
        {"file": "cam1\\b.jpg", "detections": [{**animal, "conf": 0.1}]},
        {"file": "cam2\\a.jpg", "detections": []},
        {"file": "cam2\\c.jpg", "failure": "Failure image access"},
        {"file": "cam2\\v.mp4", "detections": [animal]},
        {"file": "cam3\\d.jpg", "detections": [animal]},
    ]
    names = {
        "detection_categories": {"1": "animal", "2": "person"},
        "classification_categories": {"0": "a", "1": "fox"},
    }
    file = write(home / "md.json", {"images": images} | names)
    expected = [["cam1/a.jpg", "2024-02-01 03:04:05", "fox", 6, 9, 18, 13.5]]
    assert rows(file, "path", "time", "species", *SIDES, images=home) == expected
    assert len(images_at(home, boxes=Boxes(file))) == 1
    counts = (
        "1 video, 1 image that the detector could not read, 1 image without an animal, 1 box of a person or vehicle"
    )
    assert f"{file}: left out: {counts}" in caplog.text
    assert f"{file}: left out: 1 box of a confidence below 0.2 (--box-confidence)" in caplog.text
    assert f"{file}: left out: 1 image that is not in {home}: cam3/d.jpg" in caplog.text
    one = {"filepath": "cam1/a.jpg", "detections": [animal], "prediction": "x;mammalia;vulpes;red fox"}
    del animal["classifications"]
    file = write(home / "sn.json", {"predictions": [one]})
    assert rows(file, "path", "species", *SIDES) == [["cam1/a.jpg", "red fox", 6, 9, 18, 13.5]]


@pytest.mark.parametrize(
    ("line", "group"),
    [
        ("3 0.5 0.5 0.5 0.5", None),
        ("3 0.5 0.5 0.5 0.5 0.9", None),
        ("3 0.5 0.5 0.5 0.5 0.9 7", "7"),
        ("3 0.5 0.5 0.5 0.5 7", "7"),
        ("3 0.25 0.25 0.75 0.25 0.75 0.75 0.25 0.75", None),
        ("3 0.25 0.25 0.75 0.25 0.5 0.75", None),
    ],
)
def test_boxes_tracks_and_polygons_of_yolo(home: Path, line: str, group: str | None):
    folder = write(home / "labels" / "cam1" / "a.txt", f"{line}\n").parent.parent
    found = read_images(folder, needs=("path",), images=home)
    row = found.table.to_pylist()[0]
    assert [row["path"], *(row[side] for side in SIDES)] == ["cam1/a.jpg", 6, 4.5, 18, 13.5]
    assert row.get("group") == group


@pytest.mark.parametrize(
    ("content", "columns"),
    [
        ("File,RelativePath,Animal\na.jpg,cam1,fox\nc.jpg,cam2,owl\n", {"label": "Animal"}),
        ("FileName,Path,ID\na.jpg,/cam1,fox\nc.jpg,/cam2,owl\n", {}),
        ("place,name,kind\ncam1,a,fox\ncam2,c,owl\n", {"path": "{place}/{name}.jpg", "label": "kind"}),
        ("image,label\ncam1/a,fox\ncam2/c,owl\n", {}),
        ("image,label\nC:\\photos\\x\\cam1\\a.jpg,fox\nC:\\photos\\x\\cam2\\c.jpg,owl\n", {}),
        ("image,label\n/home/me/x/cam1/a.jpg,fox\n/home/me/x/cam2/c.jpg,owl\n", {}),
    ],
)
def test_paths_as_people_have_them(home: Path, content: str, columns: dict[str, str]):
    config = TableConfig(file=str(write(home / "t.csv", content)), columns=columns, split="all")
    images = config.build("all")
    assert list(images.paths) == [str(home / "cam1/a.jpg"), str(home / "cam2/c.jpg")]
    assert images.class_names == ("fox", "owl")


def test_images_lie_in_a_folder_next_to_the_table(home: Path):
    file = write(home / "lists" / "t.csv", "path,label\na.jpg,fox\n")
    trees.photo(home / "lists" / "images" / "a.jpg", 0)
    assert rows(file, "path") == [["images/a.jpg"]]
    assert rows(file, "path", root=home / "cam1") == [["a.jpg"]]


def test_paths_that_would_become_one_image_stay(home: Path):
    """Both end in a.jpg, which lies next to the table."""
    trees.photo(home / "a.jpg", 0)
    file = write(home / "t.csv", "path,label\nx/a.jpg,fox\ny/a.jpg,owl\n")
    assert rows(file, "path") == [["x/a.jpg"], ["y/a.jpg"]]


def test_two_columns_for_one_meaning_are_asked_for_and_one_can_be_left_out(home: Path):
    file = write(home / "t.csv", "path,identity,name,Group\ncam1/a.jpg,fox,Amy,g\n")
    with pytest.raises(
        UserError, match="'identity' and 'name' may be the label; name the right one with --column label"
    ):
        read_images(file)
    columns = {"label": "name", "group": ""}
    assert rows(file, "label", columns=columns) == [["Amy"]]
    assert "group" not in read_images(file, columns=columns).table.column_names
    with pytest.raises(UserError, match="--column kind: expected one of path, label"):
        read_images(file, columns={"kind": "name"})


def test_a_plug_in_adds_a_reader(home: Path):
    class ListReader(Reader):
        title = "list"

        def recognizes(self, path: Path) -> bool:
            return path.suffix == ".lst"

        def read(self, path: Path) -> ImageTable:
            return ImageTable(table_of([{"path": line} for line in path.read_text().split()]), path, path.parent)

    try:
        assert rows(write(home / "t.lst", "cam1/a.jpg cam2/c.jpg"), "path") == [["cam1/a.jpg"], ["cam2/c.jpg"]]
    finally:
        Reader.known.pop(0)
    assert reader_of(home / "t.lst") is None


def test_class_folders_with_notes_are_no_labels_of_yolo(home: Path):
    for name, text in (("notes.txt", "0 0.5 0.5 1 1\n"), ("labels/a.txt", "two words\n")):
        write(home / name, text)
    assert reader_of(home) is None and reader_of(home / "labels") is None


def test_market_1501(tmp_path: Path):
    """Labels and cameras are those of the names, and images of a query's label and camera are one group."""
    names = {
        "bounding_box_train": ["0002_c1s1_000451_03.jpg", "0002_c2s1_000551_01.jpg"],
        "bounding_box_test": ["-1_c1s1_000401_03.jpg", "0000_c1s1_000151_01.jpg", "0003_c4s6_015641_00.jpg"],
        "query": ["0003_c1s6_015971_00.jpg"],
        "gt_bbox": ["0003_c4s6_015641_00.jpg"],
    }
    for number, name in enumerate(f"{folder}/{file}" for folder, files in names.items() for file in files):
        trees.photo(tmp_path / name, number)
    assert rows(tmp_path, "path", "label", "group", "split", "query", "gallery") == [
        ["bounding_box_train/0002_c1s1_000451_03.jpg", "0002", "0002_c1", "train", "false", "false"],
        ["bounding_box_train/0002_c2s1_000551_01.jpg", "0002", "0002_c2", "train", "false", "false"],
        ["bounding_box_test/0000_c1s1_000151_01.jpg", "0000", "0000_c1", "test", "false", "true"],
        ["bounding_box_test/0003_c4s6_015641_00.jpg", "0003", "0003_c4", "test", "false", "true"],
        ["query/0003_c1s6_015971_00.jpg", "0003", "0003_c1", "test", "true", "false"],
    ]
    images = TableConfig(file=str(tmp_path), validation_fraction=0).build("test")
    assert images.query is not None and images.query.tolist() == [False, False, True]
    assert read_images(tmp_path).notes == [f"{tmp_path}: left out: 1 junk image (-1), 1 other folder"]
