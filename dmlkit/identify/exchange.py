"""Answers in formats of other programs, written into a copy of what they are on: Camtrap DP, MegaDetector, MOT."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from datetime import UTC, datetime
from pathlib import Path

from dmlkit import __version__
from dmlkit.datasets.files.boxes import Boxes
from dmlkit.errors import UserError, counted
from dmlkit.files.columns import text_column
from dmlkit.files.csv_table import read_csv
from dmlkit.files.labels import UNKNOWN
from dmlkit.files.outputs import BOX, check_file, write_output, write_table
from dmlkit.files.readers.base import ImageTable, json_at, reader_of
from dmlkit.files.readers.camtrap import OBSERVATIONS
from dmlkit.identify.answers import Answer, Identified
from dmlkit.vectors.images import query_table

FIELDS = (
    *("observationID", "deploymentID", "mediaID", "eventID", "eventStart", "eventEnd", "observationLevel"),
    *("observationType", "cameraSetupType", "scientificName", "count", "lifeStage", "sex", "behavior", "individualID"),
    *("individualPositionRadius", "individualPositionAngle", "individualSpeed", "bboxX", "bboxY", "bboxWidth"),
    *("bboxHeight", "classificationMethod", "classifiedBy", "classificationTimestamp", "classificationProbability"),
    *("observationTags", "observationComments"),
)
"""Columns of observations in Camtrap DP 1.0, in the order of its schema."""
GROUP = "group"
NAMES = "labels.txt"  # of the labels of tracks, as CVAT's MOT format has it


Writer = Callable[[ImageTable, Mapping[int, Answer], Path], str]
"""Writes the answers of those rows of a table that have one, and returns a line on what is written."""


def writer_of(path: Path, images: Path, boxes: Boxes | None) -> Writer | None:
    """Return what writes answers on images into a file of another program; None for a table or a document of dmlkit."""
    listing = images if boxes is None or boxes.source is None else boxes.source
    reader = reader_of(listing)
    title = None if reader is None else reader.title
    if path.name == OBSERVATIONS:
        if title == "Camtrap DP":
            _observations(listing if listing.is_dir() else listing.parent)  # before images are embedded
            return write_observations
        raise UserError(
            f"--output {path}: observations of Camtrap DP need its deployments and media, which {images} lacks; "
            "choose another name for a table of answers"
        )
    if path.suffix.lower() == ".txt":
        if path.name.lower() == NAMES:
            raise UserError(
                f"--output {path}: the names of labels are written there; choose another name for the MOT text"
            )
        check_file(path.with_name(NAMES), sources=[images, listing])
        if reader is not None and title == "YOLO" and GROUP in reader.read(listing).table.column_names:
            return write_tracks
        raise UserError(
            f"--output {path}: a MOT text needs boxes with tracks, as Ultralytics writes them; give their folder with "
            "--boxes, or a name that ends in .csv or .json"
        )
    return write_detections if path.suffix.lower() == ".json" and title == "MegaDetector" else None


def write_exchange(identified: Identified, path: Path, images: Path, boxes: Boxes | None, write: Writer) -> str:
    """Write answers by a `writer_of` their images, and return a line on what is written."""
    table = query_table(images, boxes)
    assert table is not None
    pairs = zip(identified.table_rows, identified.answers, strict=True)
    return write(table, {row: answer for rows, answer in pairs for row in rows}, path)


def _column(table: ImageTable, name: str) -> list[str | None]:
    return text_column(table.table, str(table.file), name).to_pylist()


def _observations(folder: Path) -> tuple[list[str], dict[str, dict[str, str]]]:
    """Return the columns of the observations of a Camtrap DP package, and the observations by their ids."""
    file = folder / OBSERVATIONS
    source, observations = read_csv(file), dict[str, dict[str, str]]()
    for line, cells in source.rows():
        name = cells.get("observationID")
        if not name or name in observations:
            fault = f"observationID {name!r} comes a second time" if name else "has no observationID"
            raise UserError(f"{file}:{line}: {fault}; expected one of its own for each observation, so write it there")
        observations[name] = cells
    return source.names, observations


def write_observations(table: ImageTable, answers: Mapping[int, Answer], path: Path) -> str:
    """Write the observations of a Camtrap DP package with the individuals that were identified.

    An observation of one medium gets its individual, unless it has one. One of an event stays, and is followed by an
    observation of each of its media in which an individual was identified. All other observations stay as they are.
    """
    names, observations = _observations(table.file)
    columns = sorted({*FIELDS, *names}, key=lambda name: FIELDS.index(name) if name in FIELDS else len(FIELDS))
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    changed, media = dict[str, dict[str, str]](), list[dict[str, str]]()
    pairs = zip(_column(table, "observationID"), _column(table, "mediaID"), strict=True)
    for row, (observation, medium) in enumerate(pairs):
        answer, cells = answers.get(row), observations[str(observation)]
        if answer is None or answer.label == UNKNOWN or cells.get("individualID"):
            continue
        probability = "" if answer.probability is None else f"{answer.probability:.6g}"
        cells = cells | {
            "individualID": answer.label,
            "classificationMethod": "machine",
            "classifiedBy": f"dmlkit {__version__}",
            "classificationTimestamp": now,
            "classificationProbability": probability,
        }
        if cells["mediaID"]:
            changed[str(observation)] = cells
        else:
            number = {"observationID": f"{observation}-{medium}", "mediaID": str(medium), "count": "1"}
            media.append(cells | number | {"observationLevel": "media"})
    rows = [changed.get(name, cells) for name, cells in observations.items()] + media
    write_table(path, columns, ([cells.get(name, "") for name in columns] for cells in rows), is_data=True)
    named = sum(bool(cells.get("individualID")) for cells in observations.values())
    added = counted(len(changed) + len(media), "observation gets", "observations get")
    others = f"{len(observations) - len(changed):,} as before" + (
        f", {named:,} of them with an individual" if named else ""
    )
    return f"{added} an individual; {others}"


def write_detections(table: ImageTable, answers: Mapping[int, Answer], path: Path) -> str:
    """Write the JSON of MegaDetector with the labels as the first classification of their boxes.

    Its confidence is the probability, or the similarity without one; a box of an unknown label is not changed.
    """
    data = deepcopy(json_at(table.file))
    categories: dict[str, str] = data.setdefault("classification_categories", {})
    numbers = {name: number for number, name in reversed(categories.items())}
    free = max((int(number) for number in categories if number.isdecimal()), default=-1) + 1
    count = 0
    for row, answer in answers.items():
        position = re.search(r"images\.(\d+)\.detections\.(\d+)$", table.place(row))
        if answer.label == UNKNOWN or position is None:
            continue
        if answer.label not in numbers:
            numbers[answer.label] = str(free)
            categories[str(free)] = answer.label
            free += 1
        box = data["images"][int(position[1])]["detections"][int(position[2])]
        confidence = min(max(answer.score if answer.probability is None else answer.probability, 0.0), 1.0)
        box["classifications"] = [[numbers[answer.label], round(confidence, 4)], *box.get("classifications", [])]
        count += 1
    write_output(path, json.dumps(data, ensure_ascii=False, indent=1))
    return f"{counted(count, 'box', 'boxes')} with a label"


def write_tracks(table: ImageTable, answers: Mapping[int, Answer], path: Path) -> str:
    """Write tracks as MOT text, a line per box: frame, track, left, top, width, height, 1, label, 1.

    A label is its line in ``labels.txt``, from 1, and -1 if it is unknown. A frame is the number at the end of an
    image's name, or its place among the sorted names, from 1, if a name has none.
    """
    names = sorted({answer.label for answer in answers.values()} - {UNKNOWN})
    paths, tracks = (_column(table, name) for name in ("path", GROUP))
    frames = _frames([str(name) for name in paths])
    sides = zip(*(table.table[side].to_pylist() for side in BOX), strict=True)
    lines, without = list[tuple[int, str]](), 0
    for row, (left, top, right, bottom) in enumerate(sides):
        if row not in answers:
            continue
        if tracks[row] is None:
            without += 1
            continue
        label = answers[row].label
        numbers = [left, top, right - left, bottom - top]
        box = ",".join(f"{number:.6g}" for number in numbers)
        frame = frames[str(paths[row])]
        lines.append((frame, f"{frame},{tracks[row]},{box},1,{-1 if label == UNKNOWN else names.index(label) + 1},1"))
    for file, texts in ((path, [line for _, line in sorted(lines)]), (path.with_name(NAMES), names)):
        write_output(file, "".join(f"{text}\n" for text in texts))
    others = f"; {counted(without, 'box', 'boxes')} without a track left out" if without else ""
    return f"{counted(len(lines), 'box', 'boxes')}, and {path.with_name(NAMES)} with the names of labels{others}"


def _frames(paths: Sequence[str]) -> dict[str, int]:
    """Return the number of the frame of each image.

    Example:
        >>> _frames(["cam/clip_12.jpg", "cam/clip_7.jpg"]), _frames(["b.jpg", "a.jpg"])
        ({'cam/clip_12.jpg': 12, 'cam/clip_7.jpg': 7}, {'a.jpg': 1, 'b.jpg': 2})
    """
    ends = {path: re.search(r"(\d+)$", Path(path).stem) for path in paths}
    numbers = {path: int(end[1]) for path, end in ends.items() if end is not None}
    if len(numbers) == len(ends) == len({*numbers.values()}):
        return numbers
    return {path: number for number, path in enumerate(sorted(ends), start=1)}
