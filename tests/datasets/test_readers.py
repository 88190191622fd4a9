"""Formats that list images, each compared with rows written by hand."""

import json
import zipfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from dmlkit.datasets import FolderConfig, TableConfig
from dmlkit.datasets.files.boxes import Boxes
from dmlkit.errors import UserError
from dmlkit.files.image_table import read_images, write_images
from dmlkit.files.readers.base import reader_of
from dmlkit.vectors.images import images_at
from tests.conftest import Cli, refuses
from tests.datasets import trees

SIDES = ("x1", "y1", "x2", "y2")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Four photos of 24 x 18 pixels, in folders of cameras."""
    trees.photos(tmp_path, ("cam1/a.jpg", "cam1/b.jpg", "cam2/a.jpg", "cam2/c.jpg"))
    return tmp_path


def rows(file: Path, *names: str, **options: Any) -> list[list[Any]]:
    table = read_images(file, needs=("path",), **options)
    return [list(row) for row in zip(*(table.table[name].to_pylist() for name in names), strict=True)]


def write(path: Path, content: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".arrow", ".feather"])
def test_tables_of_other_formats(home: Path, suffix: str):
    cells = {"file_name": ["cam1/a.jpg", "cam2/c.jpg"], "identity": ["007", "fox"], "note": [None, "x"]}
    file, table = home / f"t{suffix}", pa.table(cells)
    if suffix == ".jsonl":
        lines = [dict(zip(cells, row, strict=True)) for row in zip(*cells.values(), strict=True)]
        file.write_text("\n".join(json.dumps({k: v for k, v in line.items() if v}) for line in lines))
    else:
        create = pa.ipc.new_stream if suffix == ".arrow" else pa.ipc.new_file
        with pa.OSFile(str(file), "wb") as sink, create(sink, table.schema) as writer:
            writer.write_table(table)
    found = rows(file, "path", "label", "note", columns={"path": "file_name"})
    assert found == [["cam1/a.jpg", "007", None], ["cam2/c.jpg", "fox", "x"]]


def test_a_list_of_objects_is_a_table(home: Path):
    """As pandas writes one; boxes in objects of an image are pointed out."""
    cells = [{"image": "cam1/a.jpg", "label": 7}, {"image": "cam2/c.jpg", "label": "fox", "side": "left"}]
    file = write(home / "t.json", cells)
    assert rows(file, "path", "label", "side") == [["cam1/a.jpg", "7", None], ["cam2/c.jpg", "fox", "left"]]
    assert read_images(file).place(1) == f"{file}: row 2"
    file.write_text(json.dumps(cells), encoding="utf-8-sig")
    assert rows(file, "label") == [["7"], ["fox"]]
    write(file, [cells[0] | {"label": float("nan")}, cells[1]])  # of pandas, which Python's json writes as NaN
    assert rows(file, "label") == [[None], ["fox"]]
    refuses(r"t.json: row 2: got '7'; expected a JSON object", read_images, write(file, [cells[0], 7]))


def test_lines_of_json(home: Path, caplog: pytest.LogCaptureFixture):
    """They may have the line ends of Unicode, and boxes of several objects are not passed over."""
    boxes = '"objects": {"bbox": [[1, 2, 3, 4]]}'
    first, second = '"path": "cam1/a.jpg", "label": "red\u2028fox"', '"path": "cam2/c.jpg", "label": "a\x85b"'
    (home / "t.jsonl").write_text(f"{{{first}, {boxes}}}\r\n{{{second}}}\n")
    assert rows(home / "t.jsonl", "path", "label") == [["cam1/a.jpg", "red\u2028fox"], ["cam2/c.jpg", "a\x85b"]]
    assert "'objects' has boxes, which are not read; write a row per box, with x1, y1, x2, y2" in caplog.text


@pytest.mark.parametrize("line", ["[1]", '{"path":', "7"])
def test_a_line_that_is_no_object_is_named(home: Path, line: str):
    file = write(home / "t.jsonl", f'{{"path": "cam1/a.jpg"}}\n{line}\n')
    refuses(r"t.jsonl:2: .*expected (a JSON object|objects)", read_images, file)


def coco(path: Path, *annotations: dict[str, Any], image: str = "cam1/a.jpg", fox: int | None = 1) -> Path:
    """Write annotations of COCO of one image, whose id is 1; ``fox`` is the id of the only category."""
    categories = {} if fox is None else {"categories": [{"id": fox, "name": "fox"}]}
    return write(path, {"images": [{"id": 1, "file_name": image}], "annotations": annotations} | categories)


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


def test_test_images_of_coco_are_images_without_annotations(home: Path):
    """Lists such as image_info_test2017.json have no key ``annotations``; they are no file of MegaDetector."""
    images = [{"id": n, "file_name": f"cam1/{n}.jpg"} for n in range(2)]
    file = write(home / "test.json", {"images": images, "categories": [{"id": 1, "name": "fox"}]})
    with pytest.raises(UserError, match=r"test.json: lists no images; .*: left out: 2 images without annotations$"):
        images_at(file)


def test_polygons_and_attributes_of_coco(home: Path):
    annotation = {"image_id": 1, "category_id": 1, "segmentation": [[2, 3, 12, 3, 7, 15.5]], "name": "Amy"}
    file = coco(home / "c.json", annotation)
    assert rows(file, "path", "label", *SIDES) == [["cam1/a.jpg", "fox", 2, 3, 12, 15.5]]
    assert rows(file, "label", columns={"label": "name"}) == [["Amy"]]
    file = coco(home / "c.json", annotation | {"bbox": []})  # as converters write one that they did not compute
    assert rows(file, "path", "label", *SIDES) == [["cam1/a.jpg", "fox", 2, 3, 12, 15.5]]
    attributes = json.loads(file.read_text())
    attributes["images"][0]["file_attributes"] = {}  # which annotations of VIA have too
    assert rows(write(file, attributes), "label") == [["fox"]]
    of_cvat = {"id": "A12", "occluded": False, "name": "not Amy", "label": "owl", "path": "b.jpg", "parts": [1]}
    file = coco(home / "c.json", annotation | {"id": 5, "attributes": of_cvat})
    assert rows(file, "path", "label", "id", "occluded", "name") == [["cam1/a.jpg", "fox", "A12", "false", "Amy"]]


def test_images_lie_in_a_folder_next_to_that_of_annotations_or_to_the_table(home: Path):
    trees.photo(home / "images" / "a.jpg", 0)
    annotation = {"image_id": 1, "category_id": 1, "bbox": [1, 2, 3, 4]}
    file = coco(home / "annotations" / "c.json", annotation, image="a.jpg")
    assert list(images_at(file).paths) == [f"{home}/images/a.jpg"]
    file = write(home / "t.csv", "path,label\na.jpg,fox\n")
    assert rows(file, "path") == [["images/a.jpg"]] and rows(file, "path", root=home / "cam1") == [["a.jpg"]]


def test_an_unknown_category_of_coco_is_counted(home: Path):
    annotation = {"image_id": 1, "category_id": 7, "bbox": [1, 2, 3, 4]}
    file = coco(home / "c.json", annotation, fox=0)
    table = read_images(file)
    assert table.notes == [f"{file}: without a label: 1 annotation of a category that it does not list"]
    assert table.table["label"].to_pylist() == [None]
    assert read_images(coco(file, annotation, fox=None)).notes == []  # boxes of a detector, without any names
    annotations = {"image_id": 1, "bbox": [1, 2, 3, 4]}, {"image_id": 1, "category_id": 0, "bbox": [4, 3, 2, 1]}
    assert rows(coco(file, *annotations, fox=0), "label") == [[None], ["fox"]]  # no category is not the category 0


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
    names = {"detection_categories": {"1": "animal", "2": "person"}}
    names["classification_categories"] = {"0": "a", "1": "fox"}
    file = write(home / "md.json", {"images": images} | names)
    expected = [["cam1/a.jpg", "2024-02-01 03:04:05", "fox", 6, 9, 18, 13.5]]
    assert rows(file, "path", "time", "species", *SIDES, images=home) == expected
    assert [len(images_at(home, boxes=Boxes(file, confidence=least))) for least in (None, 0.05)] == [1, 2]
    assert len(rows(write(home / "unnamed.json", {"images": images}), "path", images=home)) == 2
    counts = "1 video, 1 image that the detector could not read, 1 image without an animal, 1 box of a person or"
    assert f"{file}: left out: {counts} vehicle" in caplog.text
    assert f"{file}: left out: 1 box of a confidence below 0.2 (--box-confidence)" in caplog.text
    assert f"{file}: left out: 1 image that is not in {home}: cam3/d.jpg" in caplog.text
    one = {"filepath": "cam1/a.jpg", "detections": [animal], "prediction": "x;mammalia;vulpes;red fox"}
    del animal["classifications"]
    file = write(home / "sn.json", {"predictions": [one]})
    assert rows(file, "path", "species", *SIDES) == [["cam1/a.jpg", "red fox", 6, 9, 18, 13.5]]
    assert rows(write(file, {"images": images, "predictions": [one]} | names), "path", images=home) == [["cam1/a.jpg"]]


def test_three_corners_of_yolo_are_no_box_with_a_track(home: Path):
    write(home / "labels" / "cam1" / "a.txt", "0 0.1 0.2 0.9 0.2 0.5 1\n0 0.5 0.5 0.5 0.5 0.9 1\n")
    polygon, box = read_images(home / "labels", needs=("path",), images=home).table.to_pylist()
    assert [polygon[side] for side in SIDES] == pytest.approx([2.4, 3.6, 21.6, 18]) and polygon["group"] is None
    assert [box[side] for side in SIDES] == [6, 4.5, 18, 13.5] and box["group"] == "1"


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
    row = read_images(folder, needs=("path",), images=home).table.to_pylist()[0]
    assert [row["path"], *(row[side] for side in SIDES)] == ["cam1/a.jpg", 6, 4.5, 18, 13.5]
    assert row.get("group") == group


@pytest.mark.parametrize(
    ("content", "columns"),
    [
        ("File,RelativePath,Animal\na.jpg,cam1,fox\nc.jpg,cam2,owl\n", {"label": "Animal"}),
        ("File,RelativePath,Folder,Animal\na.jpg,cam1,x,fox\nc.jpg,cam2,x,owl\n", {"label": "Animal"}),
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


def test_paths_that_would_become_one_image_stay(home: Path):
    """Both end in a.jpg, which lies next to the table."""
    trees.photo(home / "a.jpg", 0)
    file = write(home / "t.csv", "path,label\nx/a.jpg,fox\ny/a.jpg,owl\n")
    assert rows(file, "path") == [["x/a.jpg"], ["y/a.jpg"]]


def test_two_columns_for_one_meaning_are_asked_for_and_one_can_be_left_out(home: Path):
    file = write(home / "t.csv", "path,identity,name,Group\ncam1/a.jpg,fox,Amy,g\n")
    refuses("'identity' and 'name' may be the label; name the right one with --column label", read_images, file)
    columns = {"label": "name", "group": ""}
    assert rows(file, "label", columns=columns) == [["Amy"]]
    assert "group" not in read_images(file, columns=columns).table.column_names
    refuses("--column kind: expected one of path, label", read_images, file, columns={"kind": "name"})


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
    trees.photos(tmp_path, (f"{folder}/{file}" for folder, files in names.items() for file in files))
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


DEPLOYMENTS = "deploymentID,latitude,longitude\nd1,51.5,4.7\nd2,-3,20\n"
MEDIA = """mediaID,deploymentID,timestamp,filePath,fileMediatype
m1,d1,2020-05-30T04:57:37+02:00,cam1/a.jpg,image/jpeg
m2,d1,2020-05-30T04:57:40+02:00,cam1/b.jpg,image/jpeg
m3,d2,2020-06-01T10:00:00Z,cam2/a.jpg,image/jpeg
m4,d2,2020-06-01T10:00:09Z,cam2/c.jpg,image/jpeg
m5,d2,2020-06-02T10:00:09Z,cam2/v.mp4,video/mp4
m6,d2,2020-06-03T10:00:09Z,cam2/d.jpg,image/jpeg
"""
HEAD = "observationID,deploymentID,mediaID,eventID,eventStart,eventEnd,observationType,scientificName,individualID,"
HEAD += "bboxX,bboxY,bboxWidth,bboxHeight\n"


def camtrap(home: Path, observations: str) -> Path:
    write(home / "deployments.csv", DEPLOYMENTS)
    write(home / "media.csv", MEDIA)
    write(home / "observations.csv", HEAD + observations)
    return home


@pytest.mark.parametrize("name", ["", "media.csv", "observations.csv", "deployments.csv"])
def test_camtrap_dp(home: Path, name: str):
    """Boxes in pixels of 24 x 18, the time of the medium, the place of its deployment, and the individual as label."""
    observations = (
        "o1,d1,m1,e1,,,animal,Vulpes vulpes,A12,0.25,0.5,0.5,0.25\n"
        "o2,d1,m1,e1,,,animal,Vulpes vulpes,A13,0,0,0.5,0.5\n"
        "o3,d1,m2,e1,,,animal,Vulpes vulpes,A12,,,,\n"
        "o4,d2,m3,e2,,,human,,,,,,\n"
        "o5,d2,m4,e2,,,animal,Lynx lynx,L1,,,,\n"
        "o6,d2,m4,e2,,,animal,Lynx lynx,L2,,,,\n"
        "o7,d2,m5,e3,,,animal,Lynx lynx,L1,,,,\n"
        "o8,d1,m2,e1,,,animal,Vulpes vulpes,A12,,,,\n"
    )
    file = camtrap(home, observations) / name
    t1, t2 = "2020-05-30T04:57:37+02:00", "2020-05-30T04:57:40+02:00"
    names = ("path", "label", "group", "scientificName", "time", "latitude", "longitude", *SIDES)
    assert rows(file, *names) == [
        ["cam1/a.jpg", "A12", "e1", "Vulpes vulpes", t1, "51.5", "4.7", 6, 9, 18, 13.5],
        ["cam1/a.jpg", "A13", "e1", "Vulpes vulpes", t1, "51.5", "4.7", 0, 0, 12, 9],
        ["cam1/b.jpg", "A12", "e1", "Vulpes vulpes", t2, "51.5", "4.7", None, None, None, None],
    ]
    counts = "1 observation of no animal, 1 observation in a video, 1 medium without an observation, 1 image of several"
    more = "individuals without boxes, 1 repeated observation of an individual"
    assert read_images(file).notes == [f"{home}: left out: {counts} {more}"]


def test_observations_of_events_in_camtrap_dp(home: Path):
    """They are those of the media of their deployment and time; a medium with an observation of its own keeps it."""
    start, end = "2020-06-01T12:00:00+02:00", "2020-06-01T10:00:09Z"
    observations = f"o1,d2,,e2,{start},{end},animal,Lynx lynx,L1,,,,\no2,d2,m4,e2,,,animal,Lynx lynx,L2,,,,\n"
    file = camtrap(home, observations)
    assert rows(file, "path", "label", "group") == [["cam2/c.jpg", "L2", "e2"], ["cam2/a.jpg", "L1", "e2"]]
    camtrap(home, observations + f"o3,d1,,e3,{start},{end},animal,Lynx lynx,L3,,,,\n")
    assert "1 observation of an event without other media, 4 media without" in read_images(file).notes[0]


def test_two_species_in_an_image_of_camtrap_dp_are_two_individuals(home: Path):
    seen = ((1, "a"), (1, "b"), (2, "c"))
    lines = (f"o{row},d1,m{medium},e1,,,animal,{name},,,,,\n" for row, (medium, name) in enumerate(seen))
    table = read_images(camtrap(home, "".join(lines)), columns={"label": "scientificName"})
    assert table.table["label"].to_pylist() == ["c"] and "1 image of several individuals" in table.notes[0]


def test_camtrap_dp_without_individuals_asks_for_the_label(home: Path):
    file = camtrap(home, "o1,d1,m1,e1,,,animal,Vulpes vulpes,,,,,\n")
    refuses(r"has no column 'label'.*scientificName.*--column label=NAME", read_images, file)
    assert rows(file, "path", "label", columns={"label": "scientificName"}) == [["cam1/a.jpg", "Vulpes vulpes"]]


def test_an_unknown_medium_and_a_wrong_box_of_camtrap_dp_are_located(home: Path):
    faults = read_images(camtrap(home, "o1,d1,m9,e1,,,animal,,A,,,,\no1,d1,m1,e1,,,animal,,A,,,,\n")).faults
    assert faults == [f"{home / 'observations.csv'}:2: mediaID 'm9' is not in media.csv"]
    with pytest.raises(UserError, match=r"observations.csv:2: got the box \('x', '0', '1', '1'\)"):
        read_images(camtrap(home, "o1,d1,m1,e1,,,animal,,A,x,0,1,1\n"))
    write(home / "media.csv", "mediaID,deploymentID\nm1,d1\n")
    refuses(r"media.csv: has no column 'filePath'; expected one of Camtrap DP", read_images, home)


def voc(name: str, *objects: tuple[str, object, object, object, object]) -> str:
    box = "<object><name>{}</name><part><bndbox><xmin>1</xmin></bndbox></part><bndbox><ymax>{}</ymax><xmin>{}</xmin>"
    box += "<ymin>{}</ymin><xmax>{}</xmax></bndbox></object>"
    shown = "".join(box.format(label, bottom, left, top, right) for label, left, top, right, bottom in objects)
    return f"<annotation><folder/><filename>{name}</filename>{shown}</annotation>"


def test_pascal_voc(home: Path):
    trees.photos(home, ("x/JPEGImages/a.jpg", "x/JPEGImages/b.jpg", "y/train/a.jpg", "y/valid/b.jpg"))
    write(home / "x/Annotations/a.xml", voc("a.jpg", ("fox", 1, 2, 12.5, 14), ("owl", 3, 4, 9, 10)))
    write(home / "x/Annotations/b.xml", voc("C:\\photos\\b.jpg", ("fox", 0, 0, 24, 18)))
    write(home / "x/Annotations/c.xml", voc("c.jpg"))
    expected = [
        ["JPEGImages/a.jpg", "fox", 1, 2, 12.5, 14],
        ["JPEGImages/a.jpg", "owl", 3, 4, 9, 10],
        ["JPEGImages/b.jpg", "fox", 0, 0, 24, 18],
    ]
    for file, count in ((home / "x", 3), (home / "x/Annotations", 3), (home / "x/Annotations/a.xml", 2)):
        assert rows(file, "path", "label", *SIDES) == expected[:count]
    assert read_images(home / "x").notes == [f"{home / 'x'}: left out: 1 image without objects"]
    found = rows(home / "x/Annotations", "path", *SIDES, images=home / "x/JPEGImages")
    assert found == [[row[0].removeprefix("JPEGImages/"), *row[2:]] for row in expected]
    write(home / "y/train/a.xml", voc("a.jpg", ("fox", 1, 2, 3, 4)))  # as Roboflow writes them, next to the images
    write(home / "y/valid/b.xml", voc("b.jpg", ("owl", 1, 2, 3, 4)))
    assert rows(home / "y", "path", "label") == [["train/a.jpg", "fox"], ["valid/b.jpg", "owl"]]
    text = (home / "y/train/a.xml").read_text().replace("<annotation>", '<annotation verified="yes">')  # of LabelImg
    attribute = "<attribute><name>{}</name><value>{}</value></attribute>".format
    of_cvat = attribute("animal", "A12") + attribute("label", "owl")
    text = text.replace("</bndbox></object>", f"</bndbox><attributes>{of_cvat}</attributes></object>")
    (home / "y/train/a.xml").unlink()
    write(home / "y/train/a.XML", text)
    assert rows(home / "y", "path", "label", "animal") == [["train/a.jpg", "fox", "A12"], ["valid/b.jpg", "owl", None]]


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (voc("a.jpg", ("fox", 1, 2, "x", 4)), "object 1: got the box"),
        (voc("a.jpg", ("fox", 1, 2, 3, 4))[:-20], "cannot read this XML file"),
        (f'<!DOCTYPE d [<!ENTITY e SYSTEM "/etc/passwd">]>{voc("a.jpg", ("&e;", 1, 2, 3, 4))}', "has a DOCTYPE"),
        ("<annotation></annotation>", "has no annotation with a filename"),
    ],
)
def test_a_wrong_file_of_pascal_voc_is_a_fault_of_its_own(home: Path, content: str, fault: str):
    write(home / "Annotations/a.xml", voc("cam1/b.jpg", ("fox", 1, 2, 3, 4)))
    write(home / "Annotations/b.xml", content)
    table = read_images(home)
    assert len(table) == 1 and len(table.faults) == 1
    assert table.faults[0].startswith(f"{home / 'Annotations/b.xml'}: {fault}")


def test_a_data_set_of_yolo(tmp_path: Path):
    """Labels by their names, splits, and what Roboflow writes for its folders."""
    trees.photos(tmp_path, ("train/images/a.jpg", "train/images/sub/b.png", "valid/images/c.jpg"))
    trees.photo(tmp_path / "train/images/lone.jpg", 9)
    write(tmp_path / "train/labels/a.txt", "1 0.5 0.5 0.5 0.5\n0 0.25 0.25 0.5 0.5\n")
    write(tmp_path / "train/labels/sub/b.TXT", "0 0.5 0.5 0.5 0.5\n")
    write(tmp_path / "train/labels/absent.txt", "0 0.5 0.5 0.5 0.5\n")
    write(tmp_path / "valid/labels/c.txt", "1 0.25 0.25 0.75 0.25 0.5 0.75\n")
    file = write(tmp_path / "data.yaml", "train: ../train/images\nval: valid/images\nnc: 2\nnames: {0: Amy, 1: Bob}\n")
    for source in (tmp_path, file):
        assert rows(source, "path", "label", "split", *SIDES) == [
            ["train/images/a.jpg", "Bob", "train", 6, 4.5, 18, 13.5],
            ["train/images/a.jpg", "Amy", "train", 0, 0, 12, 9],
            ["train/images/sub/b.png", "Amy", "train", 6, 4.5, 18, 13.5],
            ["valid/images/c.jpg", "Bob", "validation", 6, 4.5, 18, 13.5],
        ]
    assert read_images(file).notes == [f"{file}: left out: 1 file of labels without an image, 1 image without boxes"]
    write(file, "train: [train/images]\nnames: [Amy]\n")
    assert read_images(file).faults == [f"{tmp_path / 'train/labels/a.txt'}:1: class 1, but {file} names 1"]
    write(file, "val: valid/images\nkpt_shape: [2, 3]\nnames: [Amy]\n")
    for points in ("0.1 0.1 2 0.9 0.9 2", "0.1 0.1 0.9 0.9", "0.1 0.1 2"):  # 11, 9 and 8 words
        write(tmp_path / "valid/labels/c.txt", f"0 0.5 0.5 0.5 0.5 {points}\n")
        assert rows(file, "label", *SIDES) == [["Amy", 6, 4.5, 18, 13.5]]
    trees.photo(tmp_path / "valid/images/c.png", 9)
    images = tmp_path / "valid/images"
    assert read_images(file).faults == [
        f"{images / 'c.png'}: has the labels of {images / 'c.jpg'}; expected one image of this name"
    ]
    write(file, "train: /elsewhere/images\nnames: [Amy]\n")
    refuses(r"data.yaml: train: '/elsewhere/images' is no folder below", read_images, file)


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_image_folders_of_hugging_face(tmp_path: Path, suffix: str):
    trees.photos(tmp_path, ("train/a.jpg", "train/sub/b.jpg", "test/c.jpg"))
    tables = {"train": [("a.jpg", "fox"), ("sub/b.jpg", "owl")], "test": [("c.jpg", "ant")]}
    for split, cells in tables.items():
        lines = [json.dumps({"file_name": name, "species": label}) for name, label in cells]
        text = "\n".join(["file_name,species", *map(",".join, cells)] if suffix == ".csv" else lines)
        write(tmp_path / split / f"metadata{suffix}", text)
    columns = {"label": "species"}
    expected = [["train/a.jpg", "fox", "train"], ["train/sub/b.jpg", "owl", "train"], ["test/c.jpg", "ant", "test"]]
    assert rows(tmp_path, "path", "label", "split", columns=columns) == expected
    assert rows(tmp_path / "train", "path", "label", columns=columns) == [["a.jpg", "fox"], ["sub/b.jpg", "owl"]]
    (tmp_path / "test" / f"metadata{suffix}").unlink()
    assert "split" not in read_images(tmp_path, columns=columns).table.column_names  # a single one is none


def test_tables_of_an_image_folder_that_do_not_fit_and_others_next_to_them(tmp_path: Path):
    trees.photos(tmp_path, ("train/a.jpg", "train/b.jpg", "test/c.jpg"))
    write(tmp_path / "train/metadata.csv", "file_name,label,split\na.jpg,7,train\nb.jpg,8,validation\n")
    write(tmp_path / "train/metadata.jsonl", "{}")
    write(tmp_path / "test/metadata.csv", "file_name,label\nc.jpg,9\n")
    table = read_images(tmp_path)
    assert table.table["split"].to_pylist() == ["train", "validation", "test"]
    assert table.notes == [f"{tmp_path}: reads one table in a folder; left out: train/metadata.jsonl"]
    (tmp_path / "test/metadata.csv").unlink()
    parquet.write_table(pa.table({"file_name": ["c.jpg"], "label": [9]}), tmp_path / "test/metadata.parquet")
    refuses(r"the columns of train/metadata\.csv, test/metadata\.parquet do not fit: .*label", read_images, tmp_path)


@pytest.mark.parametrize(("listed", "left_out"), [("train", 3), ("train test", 1), ("elsewhere", 0)])
def test_images_that_no_table_of_an_image_folder_lists_are_counted(tmp_path: Path, listed: str, left_out: int):
    trees.photos(tmp_path, ("train/a.jpg", "train/b.jpg", "train/sub/c.jpg", "test/d.jpg", "test/e.jpg"))
    trees.photos(tmp_path, (".old/f.jpg", "train/.g.jpg"))
    tables = {"train": "a.jpg,fox\n./sub/c.jpg,owl", "test": "d.jpg,fox\ne.jpg,owl", "elsewhere": "/mnt/a.jpg,fox"}
    for split in listed.split():
        folder = tmp_path if split == "elsewhere" else tmp_path / split
        write(folder / "metadata.csv", f"file_name,label\n{tables[split]}\n")
    count = f"{left_out} image{'s' * (left_out > 1)} that no table lists"
    notes = [note for note in read_images(tmp_path).notes if "left out" in note]
    assert notes == ([f"{tmp_path}: left out: {count}"] if left_out else [])


def test_masks_that_a_table_of_an_image_folder_lists_are_not_left_out(tmp_path: Path):
    trees.photos(tmp_path, ("train/a.jpg", "train/masks/a.png", "train/b.jpg"))
    write(tmp_path / "train/metadata.csv", "file_name,mask_file_name,label\na.jpg,masks/a.png,fox\n")
    assert f"{tmp_path}: left out: 1 image that no table lists" in read_images(tmp_path).notes


@pytest.mark.parametrize("images", ["", "JPEGImages/"])
def test_images_that_no_file_of_pascal_voc_names_are_counted(tmp_path: Path, images: str):
    trees.photos(tmp_path, [f"{images}{name}.jpg" for name in "abcd"] + ["masks/d.jpg"])
    folder = tmp_path / "Annotations" if images else tmp_path
    write(folder / "a.xml", voc("a.jpg", ("fox", 1, 2, 3, 4)))
    write(folder / "b.xml", voc("b.jpg"))
    left_out = "left out: 1 image without objects, 2 images that no XML file names"
    assert read_images(tmp_path).notes == [f"{tmp_path}: {left_out}"]
    assert read_images(folder / "a.xml").notes == []


def test_images_that_pascal_voc_names_without_a_suffix_are_not_left_out(tmp_path: Path):
    trees.photos(tmp_path, ("a.jpg", "b.jpg"))
    for name in "ab":
        write(tmp_path / f"{name}.xml", voc(name, ("fox", 1, 2, 3, 4)))
    listed = read_images(tmp_path)
    assert listed.notes == [] and listed.table["path"].to_pylist() == ["a.jpg", "b.jpg"]


BLANK = "boxes are shares of their images, so those of 1 image are left blank, which cannot be read: a"


def test_hidden_files_of_archives_are_counted(tmp_path: Path):
    """macOS adds a binary file ._NAME for each file."""
    trees.photos(tmp_path, ("yolo/images/a.jpg", "voc/a.jpg", "reid/query/0002_c1s1_000451_03.jpg"))
    for name in ("reid/bounding_box_train", "reid/bounding_box_test"):
        trees.photo(tmp_path / name / "0003_c1s1_000451_03.jpg", 1)
    write(tmp_path / "yolo/labels/a.txt", "0 0.5 0.5 1 1\n")
    write(tmp_path / "yolo/data.yaml", "train: images\nnames: [fox]\n")
    write(tmp_path / "voc/a.xml", voc("a.jpg", ("fox", 1, 2, 3, 4)))
    write(tmp_path / "reid/query/readme.txt", "text")
    hidden = ("yolo/labels/._a.txt", "yolo/images/._a.jpg", "reid/query/._0002_c1s1_000451_03.jpg")
    for name in (*hidden, *(f"voc/._{number}.xml" for number in range(20))):
        (tmp_path / name).write_bytes(b"\0\5\x16\7\0\2\0\0Mac OS X")
    left_out = {
        "yolo/labels": ["yolo/labels: left out: 1 hidden file", f"yolo/labels: {BLANK}"],
        "yolo": ["yolo/labels: left out: 1 hidden file", "yolo/images: left out: 1 hidden file"],
        "voc": ["voc: left out: 20 hidden files"],
        "reid": ["reid/query: left out: 2 files that are no images"],
    }
    for name, notes in left_out.items():
        table = read_images(tmp_path / name, needs=("path",))
        assert len(table) == (3 if name == "reid" else 1) and table.faults == []
        assert table.notes == [f"{tmp_path}/{note}" for note in notes]


def test_a_folder_with_metadata_of_other_programs(tmp_path: Path):
    """A table of wildlife-datasets has paths in another column; one without paths may lie next to class folders."""
    trees.photo(tmp_path / "x" / "a.jpg", 0)
    file = write(tmp_path / "metadata.csv", ",identity,path,date\n0,fox,x/a.jpg,2020-01-02\n")
    assert rows(tmp_path, "path", "label", "time") == [["x/a.jpg", "fox", "2020-01-02"]]
    write(file, "site,date\nnorth,2020-01-02\n")
    assert reader_of(tmp_path) is None and list(images_at(tmp_path).label_names(images_at(tmp_path).labels)) == ["x"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("train.csv", "Image,Id\na.jpg,w_1\n"),
        ("cct.json", '{"info": {}, "images": []}'),
        ("annotations/c.json", '{"images": []}'),
        ("a.json", '{"version": "5.4", "flags": {}, "shapes": []}'),
    ],
)
def test_a_list_in_a_folder_of_images_is_pointed_out(home: Path, name: str, content: str, caplog: Any):
    """Whether the folder is read as class folders or is none; other files are only counted."""
    for other in ("results.csv", "report.json"):
        write(home / other, "metric,value\n" if other[-1] == "v" else '{"map": 1}')
    assert images_at(home).class_names == ("cam1", "cam2") and "may list these images" not in caplog.text
    write(home / name, content)
    line = f"{home}: {name} may list these images: give it instead"
    assert images_at(home).class_names == ("cam1", "cam2") and line in caplog.text
    assert line in [*(listing := FolderConfig(root=str(home)).listing()).notes, *listing.faults]
    (home / "train" / "fox").mkdir(parents=True)
    refuses(f"has a folder 'train' but no folder 'test'; add it; {line}", FolderConfig(root=str(home)).listing)


def test_folders_below_those_of_the_labels_are_pointed_out(home: Path, caplog: pytest.LogCaptureFixture):
    """The pattern of the message takes their names."""
    trees.photos(home / "nested", ("fox/Amy/1.jpg", "fox/Bob/1.jpg", "owl/1.jpg"))
    images = images_at(home / "nested")
    assert images.label_names(images.labels) == ["fox", "fox", "owl"]
    assert "is the first name, 'fox' of 'fox/Amy'; --column 'label=(?P<label>[^/]+)/[^/]*$' takes" in caplog.text
    read = rows(home / "nested", "path", "label", columns={"label": "(?P<label>[^/]+)/[^/]*$"})
    assert read == [["fox/Amy/1.jpg", "Amy"], ["fox/Bob/1.jpg", "Bob"], ["owl/1.jpg", "owl"]]


def test_msmt17(tmp_path: Path):
    """Its people are numbered from 0 in both splits; validation images show people of the training."""
    expected: list[list[str]] = []
    halves = {"train": "train", "val": "train", "gallery": "test", "query": "test"}
    for number, (part, half) in enumerate(halves.items()):
        name = f"0000/0000_000_0{number}_0303morning_0015_0.jpg"
        write(tmp_path / "MSMT17" / f"list_{part}.txt", f"{name} 0\n")
        trees.photo(tmp_path / "MSMT17" / f"mask_{half}_v2" / name, number)
        cells = [half, str(part == "query").lower(), str(part == "gallery").lower()]
        expected.append([f"mask_{half}_v2/{name}", f"{half}_0000", f"{half}_0000_0{number}", *cells])
    assert rows(tmp_path, "path", "label", "group", "split", "query", "gallery") == expected


@pytest.mark.parametrize(
    ("name", "content", "tool"),
    [
        ("p.json", '[{"annotations": [{"result": []}], "data": {"image": "/data/upload/a.jpg"}}]', "Label Studio"),
        ("q.json", '[{"annotations": [{"result": []}], "data": {"coordinates": {"x": 9}}}]', "Label Studio"),
        ("c.json", '[{"image": "a.jpg", "annotations": [{"label": "a", "coordinates": {"x": 9}}]}]', "Create ML"),
        ("a.json", '{"version": "5.4", "flags": {}, "shapes": [{"label": "fox"}], "imagePath": "a.jpg"}', "labelme"),
        ("v.json", '{"_via_settings": {}, "_via_img_metadata": {}}', "the VGG Image Annotator"),
        ("w.json", '{"a.jpg9": {"regions": [], "file_attributes": {}}}', "the VGG Image Annotator"),
        ("v.csv", "filename,region_id,region_shape_attributes\na.jpg,0,{}\n", "the VGG Image Annotator"),
        ("a.xml", "<?xml version='1.0'?>\n<annotations><version>1.1</version></annotations>", "CVAT"),
    ],
)
def test_files_of_other_tools_get_one_sentence_that_names_the_export(home: Path, name: str, content: str, tool: str):
    refuses(f"this is a file of {tool}.*COCO", read_images, write(home / name, content))


OTHERS = [{}, {"annotations": "two foxes"}, {"image_id": 3, "bbox": [1, 1, 5, 5]}, {"coordinates": {"x": 9}}]


@pytest.mark.parametrize("more", OTHERS)
def test_rows_that_look_like_another_tool_are_rows(home: Path, more: dict[str, object]):
    trees.photo(home / "data" / "a.jpg", 1)
    cells = [{"path": "/somewhere/data/a.jpg", "label": "fox", **more}]
    assert rows(write(home / "t.json", cells), "path", "label") == [["data/a.jpg", "fox"]]


PARTS = r"(?P<label>[a-z]+)_(?P<group>c\d+)?"


def test_labels_and_groups_are_parts_of_the_paths(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """Of a table, and of a folder of images, for a dataset and for images that are embedded."""
    names = ["fox_c1_0.jpg", "sub/fox_c2_0.jpg", "sub/owl_c1_1.jpg", "owl__2.jpg", "4.jpg"]
    trees.photos(tmp_path / "photos", names)
    table = write(tmp_path / "photos.csv", "\n".join(["image,label,group", *(f"photos/{name},x,y" for name in names)]))
    known = {"fox_c1_0.jpg": ["fox", "c1"], "sub/fox_c2_0.jpg": ["fox", "c2"], "sub/owl_c1_1.jpg": ["owl", "c1"]}
    known |= {"owl__2.jpg": ["owl", None], "4.jpg": [None, None]}
    for source, folder in ((table, "photos/"), (tmp_path / "photos", "")):
        found = rows(source, "path", "label", "group", columns={"label": PARTS})
        assert {path.removeprefix(folder): cells for path, *cells in found} == known
        assert f"{source}: 1 path without the parts of {PARTS!r}, e.g. '{folder}4.jpg'; they have" in caplog.text
        images = images_at(source, boxes=Boxes(columns={"label": PARTS}))
        assert images.class_names == ("fox", "owl") and len(images) == 5
        config = TableConfig(file=str(source), columns={"label": PARTS}, split="all")
        assert sorted(config.build("all").class_names) == ["fox", "owl"]
    for pattern, message in (
        ("(?P<label>x+)(", "'\\(\\?P<label>x\\+\\)\\(' is no pattern"),
        ("(?P<label>[0-9])(?P<side>x)", "got the part 'side'; expected label"),
        ("(?P<label>[0-9]{9})", "5 paths without the parts of .*; expected a pattern that is in the paths"),
    ):
        refuses(message, read_images, tmp_path / "photos", columns={"label": pattern})


def test_texts_that_mean_no_label(home: Path):
    lines = "path,Id", "cam1/a.jpg,new_whale", 'cam1/b.jpg,5" Amy', "cam2/a.jpg, none ", "cam2/c.jpg,unknown"
    file = write(home / "t.csv", "\n".join(lines))
    assert rows(file, "label", columns={"unknown": "new_whale|none"}) == [[None], ['5" Amy'], [None], ["unknown"]]
    images = images_at(file, boxes=Boxes(columns={"unknown": "new_whale|none"}))
    assert images.class_names == ('5" Amy',) and images.labels.tolist() == [-1, 0, -1, -1]


def test_numbers_next_to_a_blank_one_are_labels_with_their_digits(home: Path):
    """Also in a table that is made from it, and if another number means no label."""
    cells = {"path": ["cam1/a.jpg", "cam1/b.jpg", "cam2/a.jpg"], "label": [20_230_001_234.0, float("nan"), 7.0]}
    parquet.write_table(pa.table(cells), file := home / "t.parquet")
    assert rows(file, "label", columns={"unknown": "7"}) == [["20230001234"], [None], [None]]
    write_images(read_images(file), home / "t.csv")
    assert rows(home / "t.csv", "label") == [["20230001234"], [None], ["7"]]


def test_numbers_of_rows_are_no_labels(home: Path):
    """A column called id is a label unless each row has another number."""
    names = ["cam1/a.jpg", "cam1/b.jpg", "cam2/a.jpg"]
    for ids, is_label in ((["1", "2", "3"], False), (["1", "2", "1"], True), (["w1", "w2", "w3"], True)):
        lines = [f"{number},{name},fox" for number, name in zip(ids, names, strict=True)]
        file = write(home / "t.csv", "\n".join(["Id,image,species", *lines]))
        read = read_images(file, needs=("path",)).table
        assert ("label" in read.column_names) == is_label and ("Id" in read.column_names) != is_label
        if is_label:
            assert rows(file, "label") == [[one] for one in ids]
        else:
            message = "'Id' has another number in each row, so it is not read as the label; name the right one of"
            refuses(f"{message} image, species with --column label=NAME", images_at, file)
            assert rows(file, "label", columns={"label": "Id"}) == [["1"], ["2"], ["3"]]


@pytest.mark.parametrize("head", ["cx,cy,w,h", "x_center,y_center,width,height"])
def test_boxes_by_their_centers_and_as_shares(head: str, home: Path, caplog: pytest.LogCaptureFixture):
    """Of an image of 24 x 18 pixels; in pixels none would be larger than 1."""
    for cells, are_shares in (("12,9,12,12", False), ("0.5,0.5,0.5,0.66666667", True)):
        file = write(home / "t.csv", f"path,label,{head}\ncam1/a.jpg,fox,{cells}\n")
        assert rows(file, *SIDES) == [pytest.approx([6, 3, 18, 15], abs=1e-5)]
        assert ("read as shares of their images" in caplog.text) == are_shares


def test_columns_of_boxes_can_be_named_and_left_out(home: Path, caplog: pytest.LogCaptureFixture):
    file = write(home / "t.csv", 'path,label,where,l,t,r,b,x1\ncam1/a.jpg,fox,"[1, 2, 3, 4]",5,6,7,8,0\n')
    refuses(r"has x1 without y1 and x2 and y2; .*leave these out with --column bbox=", read_images, file)
    assert "x1" not in read_images(file, columns={"bbox": ""}).table.column_names
    assert f"{file}: other columns: where, l, t, r, b; 'where' looks like boxes, which --column bbox=" in caplog.text
    assert rows(file, *SIDES, columns={"bbox": "where"}) == [[1, 2, 4, 6]]
    assert rows(file, *SIDES, columns=dict(zip(SIDES, "ltrb", strict=True))) == [[5, 6, 7, 8]]


def test_other_columns_are_named_once(home: Path, caplog: pytest.LogCaptureFixture):
    file = write(home / "t.csv", "image,identity,bbox,side,note,note\ncam1/a.jpg,fox,,left,x,y\n")
    for _ in range(2):
        images_at(file)
    line = f"{file}: reads path from 'image', label from 'identity', boxes from 'bbox' as left, top, width, height; "
    line += "other columns: side, note; left out: 1 column with the name of an earlier one: note"
    assert caplog.text.count(line) == 1 and caplog.text.count("reads") == 1 and rows(file, "note") == [["x"]]


def workbook(path: Path, *sheets: tuple[str, list[list[object]]]) -> Path:
    """Write a workbook as Excel does: numbers, dates by their style, texts, and the value of a formula."""
    kinds = {str: 't="inlineStr"><is><t>{}</t></is>', float: "><v>{}</v>", tuple: 's="1"><v>{0[0]}</v>'}
    kinds |= {list: "><f>{0[0]}</f><v>{0[1]}</v>", bool: 't="b"><v>{:d}</v>'}
    space = 'xmlns="http://schemas.openxmlformats.org/spreadsheetml/2006/main"'
    office = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
    package = "http://schemas.openxmlformats.org/package/2006/relationships"
    names, related = "", f'<Relationship Id="rId0" Type="{office}/styles" Target="styles.xml"/>'
    with zipfile.ZipFile(path, "w") as file:
        for number, (name, rows) in enumerate(sheets, start=1):
            lines = ""
            for down, row in enumerate(rows, start=1):
                cells = [
                    f'<c r="{chr(65 + across)}{down}" {kinds[type(cell)].format(cell)}</c>'
                    for across, cell in enumerate(row)
                    if cell is not None
                ]
                lines += f'<row r="{down}">{"".join(cells)}</row>'
            sheet = f"worksheets/sheet{number}.xml"
            file.writestr(f"xl/{sheet}", f"<worksheet {space}><sheetData>{lines}</sheetData></worksheet>")
            state = ' state="hidden"' if name.startswith("_") else ""
            names += f'<sheet name="{name}" sheetId="{number}"{state} r:id="rId{number}"/>'
            related += f'<Relationship Id="rId{number}" Type="{office}/worksheet" Target="{sheet}"/>'
        file.writestr("xl/workbook.xml", f'<workbook {space} xmlns:r="{office}"><sheets>{names}</sheets></workbook>')
        file.writestr("xl/_rels/workbook.xml.rels", f'<Relationships xmlns="{package}">{related}</Relationships>')
        styles = '<cellXfs><xf numFmtId="0"/><xf numFmtId="22" applyNumberFormat="1"/></cellXfs>'
        file.writestr("xl/styles.xml", f"<styleSheet {space}>{styles}</styleSheet>")
        first = f'<Relationship Id="rId1" Type="{office}/officeDocument" Target="xl/workbook.xml"/>'
        file.writestr("_rels/.rels", f'<Relationships xmlns="{package}">{first}</Relationships>')
    return path


def test_workbooks_of_excel(home: Path):
    """Whole numbers have all digits and no decimals, dates are ISO, and a formula is its stored value."""
    cells: list[list[object]] = [
        ["File", "Identity", "Date", "note", "x"],
        ["cam1/a.jpg", 7.0, (43981.5,), ["1+1", 3], 0.25],
        [],
        ["cam1/b.jpg", "fox", None, "y", True],
        ["cam1/c.jpg", float(2**53 - 1), None, "z", 0.1 + 0.2],
    ]
    sheets = ("_secret", [["File"], ["no.jpg"]]), ("empty", []), ("photos", cells), ("more", cells)
    file = workbook(home / "t.xlsx", *sheets)
    assert rows(file, "path", "label", "time", "note", "x") == [
        ["cam1/a.jpg", "7", "2020-05-30T12:00:00", "3", "0.25"],
        ["cam1/b.jpg", "fox", None, "y", "True"],
        ["cam1/c.jpg", str(2**53 - 1), None, "z", "0.3"],
    ]
    table = read_images(file)
    assert table.place(1) == f"{file}: row 4"
    assert table.notes == [f"{file}: reads the sheet 'photos'; left out: more"]
    refuses("this workbook has no cells", read_images, workbook(home / "e.xlsx", ("a", [])))


def test_any_list_of_images_is_converted_to_a_table(home: Path, dmlkit: Cli, tmp_path: Path):
    """The table is read as the annotations are, and says where its paths lead."""
    annotation = {"image_id": 1, "category_id": 1, "bbox": [2, 3, 10, 12.5], "side": "=left"}
    annotations = annotation, annotation | {"image_id": 2}
    file = coco(home / "c.json", *annotations)
    (tmp_path / "other").mkdir()
    for output, way in ((home / "t.csv", ()), (tmp_path / "other" / "t.csv", ("--root", home))):
        result = dmlkit("data", "convert", file, "-o", output)
        assert result.code == 0 and "left out: " in result.out and "image_id 2 is not one of the images" in result.out
        assert ("read it with --root" in result.out) == bool(way)
        assert output.read_text().splitlines()[0] == "path,label,x1,y1,x2,y2,side"
        names = ("path", "label", *SIDES, "side")
        expected = [["cam1/a.jpg", "fox", 2, 3, 12, 15.5, "=left"]]
        assert rows(output, *names, root=home) == rows(file, *names) == expected
        assert dmlkit("data", "check", output, *way).code in (0, 1)
    coco(home / "deep" / "c.json", *annotations, image="b.jpg", fox=None)
    trees.photo(home / "deep" / "b.jpg", 0)
    assert dmlkit("data", "convert", home / "deep" / "c.json", "-o", home / "t.csv").code == 0
    assert (home / "t.csv").read_text().splitlines()[1] == "deep/b.jpg,,2,3,12,15.5,=left"
    trees.photo(home / "classes" / "fox" / "1.jpg", 1)
    assert dmlkit("data", "convert", home / "classes", "-o", home / "u.csv").code == 0
    assert (home / "u.csv").read_text().splitlines() == ["path,label", "classes/fox/1.jpg,fox"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.csv", 'path,label\na.jpg,"fox\nb.jpg,owl\n', "t.csv: cannot read .*: a quotation mark is not closed"),
        ("data.yaml", "names: 3\ntrain: .\n", "data.yaml: names: got 3, expected the names of the classes"),
        ("data.yaml", "names: [fox]\ntrain: 5\n", "data.yaml: train: '5' is no folder below"),
        ("data.yaml", "names: [fox]\ntrain: train.txt\n", "no folder below .*; name the folder of the images instead"),
        ("Annotations/a.xml", voc("a.jpg"), "lists no images; .*left out: 1 image without objects"),
        ("metadata.jsonl", '{"label": "fox"}', "metadata.jsonl: has no column 'path'.*; it has label"),
    ],
)
def test_what_is_wrong_with_a_list_is_one_line(tmp_path: Path, name: str, content: str, message: str):
    file = write(tmp_path / name, content)
    refuses(message, read_images, file if name == "t.csv" else tmp_path)


def test_the_folder_of_the_paths_is_one_word_of_a_command(home: Path, dmlkit: Cli):
    photos = trees.photos(home / "my photos", ["a.jpg"])
    (photos / "list.csv").write_text("path,label\na.jpg,fox\n")
    said = dmlkit("data", "convert", photos / "list.csv", "-o", home / "out" / "t.csv").ok().out
    assert said.endswith(f"read it with --root '{photos}'\n")


def test_advice_quotes_names_of_columns_with_blanks(home: Path, caplog: pytest.LogCaptureFixture):
    box = '"[1, 2, 3, 4]"'
    file = write(home / "t.csv", f"I d,image,my box\n1,cam1/a.jpg,{box}\n2,cam1/b.jpg,{box}\n")
    refuses("or take it with --column 'label=I d'$", images_at, file)
    read_images(file, needs=("path",))
    assert "'my box' looks like boxes, which --column 'bbox=my box' reads" in caplog.text
