"""Answers written into the files of other programs."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from dmlkit.datasets.files.boxes import Boxes
from dmlkit.errors import UserError
from dmlkit.identify.answers import Answer, Identified
from dmlkit.identify.exchange import FIELDS, write_exchange, writer_of
from tests.conftest import csv_rows, refuses
from tests.datasets import trees

REQUIRED = ("observationID", "deploymentID", "eventStart", "eventEnd", "observationLevel", "observationType")
TIMES = ("eventStart", "eventEnd", "classificationTimestamp")
TERMS = {
    "observationLevel": "media event",
    "observationType": "animal human vehicle blank unknown unclassified",
    "classificationMethod": "human machine",
}
SIDE = (20, 10)  # pixels of a photo
SHARES = ("bboxX", "bboxY", "bboxWidth", "bboxHeight", "classificationProbability")


def check_camtrap(rows: list[dict[str, str]], media: set[str]) -> None:
    """Check rows against the table schema of observations in Camtrap DP 1.0.1."""
    assert [*rows[0]] == [*FIELDS] and len(FIELDS) == 28
    assert len({row["observationID"] for row in rows}) == len(rows)
    for row in rows:
        assert all(row[name] for name in REQUIRED)
        assert not row["mediaID"] or row["mediaID"] in media
        assert (row["observationLevel"] == "media") == bool(row["mediaID"])
        assert not row["count"] or int(row["count"]) >= 1
        for name, terms in TERMS.items():
            assert row[name] in ("", *terms.split())
        for name in TIMES:
            assert not row[name] or re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(Z|[+-]\d\d:\d\d)", row[name])
        assert all(0 <= float(row[name]) <= 1 for name in SHARES if row[name])


def answers(*labels: str | None) -> Identified:
    """Return answers on the rows of a table, None for a row without one."""
    given = {row: label for row, label in enumerate(labels) if label is not None}
    found: list[Any] = [Answer(label, "rex", 0.75, 0.5, 0.1) for label in given.values()]
    neighbors: Any = None
    return Identified(found, neighbors, None, table_rows=[[row] for row in given])


def written(found: Identified, path: Path, images: Path, boxes: Boxes | None = None) -> str:
    writer = writer_of(path, images, boxes)
    assert writer is not None
    return write_exchange(found, path, images, boxes, writer)


def package(folder: Path) -> None:
    """Write a package of a photo with two animals, one of which is known, a photo of nothing, and an event of two."""
    trees.photos(folder / "media", (f"{name}.jpg" for name in "abcd"), side=SIDE)
    times = [f"2020-05-30T02:57:0{second}Z" for second in range(4)]
    lines = [f"{name},d1,{time},media/{name}.jpg,image/jpeg" for name, time in zip("abcd", times, strict=True)]
    (folder / "media.csv").write_text("\n".join(["mediaID,deploymentID,timestamp,filePath,fileMediatype", *lines]))
    (folder / "deployments.csv").write_text("deploymentID,latitude,longitude\nd1,51.5,4.7\n")
    event = f"{times[2]},{times[3]}"
    (folder / "observations.csv").write_text(
        "observationID,deploymentID,mediaID,eventID,eventStart,eventEnd,observationLevel,observationType,"
        "scientificName,count,individualID,bboxX,bboxY,bboxWidth,bboxHeight,observationComments,ours\n"
        f"o1,d1,a,e1,{times[0]},{times[0]},media,animal,Felis catus,1,,0.1,0.2,0.5,0.6,=1+1,x\n"
        f"o2,d1,a,e1,{times[0]},{times[0]},media,animal,Felis catus,1,tom,0.5,0.2,0.5,0.6,,x\n"
        f"o3,d1,b,e1,{times[1]},{times[1]},media,blank,,,,,,,,,x\n"
        f"o4,d1,,e2,{event},event,animal,Felis catus,2,,,,,,,x\n"
    )


def test_observations_of_camtrap_dp_get_individuals_and_fit_its_schema(tmp_path: Path):
    package(tmp_path / "package")
    text = written(answers("rex", "leo", "rex", "unknown"), tmp_path / "out" / "observations.csv", tmp_path / "package")
    assert text == "2 observations get an individual; 3 as before, 1 of them with an individual"
    rows = csv_rows(tmp_path / "out" / "observations.csv")
    check_camtrap([{name: text for name, text in row.items() if name != "ours"} for row in rows], {*"abcd"})
    assert {row["ours"] for row in rows} == {"x"} and rows[0]["observationComments"] == "=1+1"
    named = [(row["observationID"], row["mediaID"], row["individualID"], row["classificationMethod"]) for row in rows]
    assert named == [
        ("o1", "a", "rex", "machine"),
        ("o2", "a", "tom", ""),
        ("o3", "b", "", ""),
        ("o4", "", "", ""),
        ("o4-c", "c", "rex", "machine"),
    ]
    assert rows[4]["count"] == "1" and rows[4]["eventID"] == "e2" and rows[0]["classificationProbability"] == "0.75"


def test_boxes_of_megadetector_get_labels_and_all_else_stays(tmp_path: Path):
    trees.photos(tmp_path, ("a.jpg", "b.jpg"), side=SIDE)
    box = {"category": "1", "conf": 0.9, "bbox": [0.1, 0.2, 0.5, 0.6]}
    data: dict[str, Any] = {
        "info": {"format_version": "1.4", "detector": "md"},
        "detection_categories": {"1": "animal", "2": "person"},
        "classification_categories": {"0": "cat", "7": "rex"},
        "images": [
            {"file": "a.jpg", "detections": [{**box, "category": "2"}, {**box, "classifications": [["0", 0.8]]}]},
            {"file": "gone.mp4", "failure": "video"},
            {"file": "b.jpg", "detections": [box, {**box, "conf": 0.01}, {**box, "bbox": [0, 0, 1, 1]}]},
        ],
    }
    (tmp_path / "md.json").write_text(json.dumps(data))
    text = written(answers("rex", "Käthe", "unknown"), tmp_path / "out.json", tmp_path / "md.json")
    assert text == "2 boxes with a label"
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["classification_categories"] == {"0": "cat", "7": "rex", "8": "Käthe"}
    assert report["images"][0]["detections"][1].pop("classifications") == [["7", 0.75], ["0", 0.8]]
    assert report["images"][2]["detections"][0].pop("classifications") == [["8", 0.75]]
    data["images"][0]["detections"][1].pop("classifications")
    assert report | {"classification_categories": 0} == data | {"classification_categories": 0}
    assert data["classification_categories"] == {"0": "cat", "7": "rex"}


def test_tracks_become_mot_text_with_the_names_of_labels(tmp_path: Path):
    """Names are written over nothing that is read or named; a box without a track is in no line, and counted."""
    frames, labels, out = tmp_path / "frames", tmp_path / "labels", tmp_path / "out" / "mot.txt"
    trees.photos(frames, ("clip_2.jpg", "clip_10.jpg"), side=SIDE)
    labels.mkdir()
    (labels / "clip_10.txt").write_text("0 0.5 0.5 0.4 0.6 0.9 3\n")
    (labels / "clip_2.txt").write_text("0 0.5 0.5 0.5 1.0 0.9 3\n0 0.2 0.5 0.4 0.6 0.8 12\n")
    boxes = Boxes(labels)
    text = written(answers("rex", "rex", "unknown"), out, frames, boxes)
    assert text == f"3 boxes, and {out.with_name('labels.txt')} with the names of labels"
    assert out.read_text().splitlines() == ["2,12,0,2,8,6,1,-1,1", "2,3,5,0,10,10,1,1,1", "10,3,6,2,8,6,1,1,1"]
    assert out.with_name("labels.txt").read_text() == "rex\n"
    refuses("the names of labels are written there", writer_of, tmp_path / "Labels.txt", frames, boxes)
    (tmp_path / "labels.txt").mkdir()
    refuses("labels.txt: this is a folder", writer_of, tmp_path / "mot.txt", frames, boxes)
    (labels / "clip_10.txt").write_text("0 0.5 0.5 0.4 0.6 0.9\n")
    text = written(answers("rex", "leo", "leo"), out, frames, boxes)
    assert text.startswith("2 boxes, and") and text.endswith("; 1 box without a track left out")
    assert [line.split(",")[1] for line in out.read_text().splitlines()] == ["12", "3"]


def test_a_file_of_another_program_needs_its_images(tmp_path: Path):
    trees.photo(tmp_path / "photos" / "a.jpg", 0, SIDE)
    (tmp_path / "t.csv").write_text("path,label\nphotos/a.jpg,a\n")
    for images in (tmp_path / "photos", tmp_path / "t.csv"):
        for name in ("answers.csv", "answers.json"):
            assert writer_of(tmp_path / name, images, None) is None
        with pytest.raises(UserError, match=r"observations of Camtrap DP need its deployments and media, which"):
            writer_of(tmp_path / "observations.csv", images, None)
        refuses(r"a MOT text needs boxes with tracks", writer_of, tmp_path / "x.txt", images, None)
    labels = tmp_path / "labels"
    labels.mkdir()
    (labels / "a.txt").write_text("0 0.5 0.5 0.4 0.6\n")
    refuses(r"a MOT text needs boxes with tracks", writer_of, tmp_path / "x.txt", tmp_path / "photos", Boxes(labels))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("o3,d1", ",d1", r"observations.csv:4: has no observationID; expected one of its own"),
        ("o3,d1", "o1,d1", r"observations.csv:4: observationID 'o1' comes a second time; expected one of its own"),
        ("observationID,", "name,", r"observations.csv:2: has no observationID; expected one of its own"),
    ],
)
def test_observations_are_told_apart_by_their_ids(old: str, new: str, message: str, tmp_path: Path):
    package(tmp_path / "package")
    file = tmp_path / "package" / "observations.csv"
    file.write_text(file.read_text().replace(old, new))
    for images in (tmp_path / "package", file):
        refuses(message, writer_of, tmp_path / "out" / "observations.csv", images, None)


def test_observations_are_those_of_the_package_also_where_its_photos_have_moved(tmp_path: Path):
    package(tmp_path / "package")
    (tmp_path / "package" / "media").rename(tmp_path / "media")
    moved = Boxes(root=tmp_path)
    written(answers("rex", "leo", "rex"), tmp_path / "out" / "observations.csv", tmp_path / "package", moved)
    assert [row["individualID"] for row in csv_rows(tmp_path / "out" / "observations.csv")][:2] == ["rex", "tom"]


@pytest.mark.parametrize("labels", [("rex", "unknown", "unknown", "leo"), ("rex", "leo", "rex", "leo")])
def test_observations_with_an_individual_are_counted_once_whatever_is_answered(labels: tuple[str, ...], tmp_path: Path):
    package(tmp_path / "package")
    file = tmp_path / "package" / "observations.csv"
    file.write_text(file.read_text().replace("event,animal,Felis catus,2,,", "event,animal,Felis catus,2,kim,"))
    text = written(answers(*labels), tmp_path / "observations.csv", tmp_path / "package")
    assert text == "1 observation gets an individual; 3 as before, 2 of them with an individual"
