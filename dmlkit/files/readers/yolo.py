"""Boxes of YOLO's text files, as Ultralytics trains on them and writes them: boxes, tracks and polygons."""

import os
from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from dmlkit.errors import UserError
from dmlkit.files.escape import excerpt
from dmlkit.files.outputs import BOX
from dmlkit.files.readers.base import ImageTable, Reader, files_below, table_of
from dmlkit.files.regular import EXTENSIONS, read_start, read_text

MOST, MOST_NAMES = 10, 1_000  # subfolders, and names in each, that are looked at
CLASSES = "classes.txt"  # names of classes, in the folder of the labels


class BoxLine(NamedTuple):
    """A line of a text file of labels."""

    where: str
    name: str  # of the image, without its suffix
    words: list[str]


class YoloReader(Reader):
    """Reader of a folder of text files, one per image with its name, with a line per object.

    A line has a class, the center and the size of a box as shares of the image, and perhaps a confidence and the number
    of a track, which is a group; or a class and the corners of a polygon.
    """

    title = "YOLO"

    def recognizes(self, path: Path) -> bool:
        if not path.is_dir():
            return False
        try:
            folders = [path, *islice((entry for entry in path.iterdir() if entry.is_dir()), MOST)]
            files = [Path(entry.path) for folder in folders for entry in islice(os.scandir(folder), MOST_NAMES)]
        except OSError:  # a folder that cannot be read is reported where its images are listed
            return False
        files = [file for file in files if not file.name.startswith(".")]
        texts = [file for file in files if file.suffix.lower() == ".txt" and file.name != CLASSES]
        has_images = any(file.suffix.lower() in EXTENSIONS for file in files)
        starts = [read_start(file, 1_000).decode(errors="replace").partition("\n")[0].split() for file in texts[:MOST]]
        return not has_images and any(starts) and all(map(_is_box, filter(None, starts)))

    def read(self, path: Path) -> ImageTable:
        faults, notes = list[str](), list[str]()
        if not (texts := text_files(path, notes)):
            raise UserError(f"{path}: this folder has no text files; expected one per image, as YOLO writes them")
        lines = [line for file in texts for line in box_lines(path, file, faults)]
        return replace(yolo_rows(path, lines, faults), notes=notes)


def _is_box(words: list[str]) -> bool:
    """Return whether the words of a line are a class and shares of an image."""
    numbers = _numbers(words)
    return len(numbers) >= 5 and all(-0.5 <= number <= 1.5 for number in numbers[1:5])


def text_files(folder: Path, notes: list[str]) -> list[Path]:
    """Return the text files of labels below a folder, see `files_below`."""
    return [file for file in files_below(folder, (".txt",), notes) if file.name != CLASSES]


def box_lines(folder: Path, file: Path, faults: list[str], words_of_box: int | None = None) -> list[BoxLine]:
    """Return the boxes of a text file below a folder; lines that are none are faults.

    ``words_of_box`` are the first words of a line that are read. Default: all.
    """
    name = file.relative_to(folder).with_suffix("").as_posix()
    boxes = list[BoxLine]()
    for number, line in enumerate(read_text(file).splitlines(), start=1):
        words = line.split()[:words_of_box]
        if len(_numbers(words)) in (5, 6) or (len(_numbers(words)) >= 7 and len(words) % 2):
            boxes.append(BoxLine(f"{file}:{number}", name, words))
        elif words:
            faults.append(f"{file}:{number}: got {excerpt(repr(line))}, expected class x y width height [confidence]")
    return boxes


def yolo_rows(folder: Path, lines: list[BoxLine], faults: list[str]) -> ImageTable:
    """Return the boxes of lines."""
    # a sixth number is a confidence, or the number of a track where all of them are whole and one is above 1
    sixths = [line.words[5] for line in lines if len(line.words) == 6]
    are_tracks = all(map(str.isdecimal, sixths)) and any(float(word) > 1 for word in sixths)
    rows, sure = list[Mapping[str, object]](), list[float]()
    for line in lines:
        numbers = _numbers(line.words)
        track, confidence = None, 1.0
        is_polygon = len(numbers) > 7 or (len(numbers) == 7 and not line.words[6].isdecimal())
        if is_polygon:
            across, down = numbers[1::2], numbers[2::2]
            sides = min(across), min(down), max(across), max(down)
        else:
            _, x, y, width, height, *extra = numbers
            sides = x - width / 2, y - height / 2, x + width / 2, y + height / 2
            track = line.words[-1] if len(extra) == 2 or (extra and are_tracks) else None
            confidence = extra[0] if extra and not (are_tracks and len(extra) == 1) else 1.0
        if not 0 <= confidence <= 1:
            raise UserError(
                f"{line.where}: got the confidence {confidence:g}, expected 0 to 1; if it is the number of a track, "
                "write tracks with confidences (Ultralytics: save_conf=True), or without their numbers"
            )
        row = {"path": line.name, "class_number": line.words[0], **dict(zip(BOX, sides, strict=True))}
        rows.append(row | ({} if track is None else {"group": track}))
        sure.append(confidence)
    places = [line.where for line in lines]
    return ImageTable(table_of(rows), folder, folder, places, confidences=sure, is_share=True, faults=faults)


def _numbers(words: list[str]) -> list[float]:
    """Return the finite numbers of a line; none if a word is not a number."""
    try:
        return [number for word in words if abs(number := float(word)) < 1e9]
    except ValueError:
        return []
