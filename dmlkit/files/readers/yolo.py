"""Boxes of YOLO's text files, as Ultralytics trains on them and writes them, alone or listed by a data.yaml."""

import os
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from dmlkit.errors import UserError
from dmlkit.files.escape import quoted
from dmlkit.files.outputs import BOX
from dmlkit.files.paths import inside
from dmlkit.files.readers.base import ImageTable, Reader, counted_out, files_below, table_of
from dmlkit.files.regular import EXTENSIONS, read_start, read_text
from dmlkit.files.yaml_tree import read_yaml

MOST, MOST_NAMES = 10, 1_000  # subfolders, and names in each, that are looked at
CLASSES = "classes.txt"  # names of classes, in the folder of the labels
SPLITS = {"train": "train", "val": "validation", "test": "test"}
FILE = "data.yaml"


class YoloDatasetReader(Reader):
    """Reader of a data.yaml, or of its folder: a row per box, with the name of its class as the label."""

    title = "YOLO data set"

    def recognizes(self, path: Path) -> bool:
        file = path / FILE if path.is_dir() else path
        if file.suffix.lower() not in (".yaml", ".yml") or not file.is_file():
            return False
        try:
            content = _content(file)
        except UserError:  # a recipe with a fault, which is reported where recipes are read
            return False
        return "names" in content and not content.keys().isdisjoint(SPLITS)

    def read(self, path: Path) -> ImageTable:
        file, faults = path / FILE if path.is_dir() else path, list[str]()
        content, rows, places = _content(file), list[Mapping[str, Any]](), list[str]()
        names: Any = content["names"]
        if not isinstance(names, dict | list):
            raise UserError(f"{file}: names: got {names!r}, expected the names of the classes, e.g. [fox, owl]")
        numbered = names.items() if isinstance(names, dict) else enumerate(names)
        labels = {str(number): str(name) for number, name in numbered}
        absent, empty, notes, sure = set[str](), 0, list[str](), list[float]()
        words = 5 if "kpt_shape" in content else None  # the points of a pose follow, which are no polygon
        for split, images in _folders(file, content):
            folder = _labels_of(images)
            lines = [line for text in _text_files(folder, notes) for line in _box_lines(folder, text, faults, words)]
            files, labeled = dict[str, Path](), {line.name for line in lines}
            for image in files_below(images, EXTENSIONS, notes):
                name = image.relative_to(images).with_suffix("").as_posix()
                if (other := files.setdefault(name, image)) != image and name in labeled:
                    faults.append(f"{image}: has the labels of {other}; expected one image of this name")
            absent |= {f"{folder / name}.txt" for name in labeled - files.keys()}
            empty += len(files.keys() - labeled)
            lines = [line for line in lines if line.name in files]
            for line, row, confidence in zip(lines, *_rows(lines), strict=True):
                number = row.pop("class_number")
                if number not in labels:
                    faults.append(f"{line.where}: class {number}, but {file} names {len(labels)}")
                    continue
                sure.append(confidence)
                name = files[line.name].relative_to(file.parent).as_posix()
                rows.append(row | {"path": name, "label": labels[number], "split": split})
                places.append(line.where)
        counts = [
            (len(absent), "file of labels without an image", "files of labels without an image"),
            (empty, "image without boxes", "images without boxes"),
        ]
        notes += counted_out(file, counts)
        table = table_of(rows)
        return ImageTable(table, file, file.parent, places, None, sure, is_share=True, faults=faults, notes=notes)


def _content(file: Path) -> dict[str, Any]:
    data = read_yaml(file, "YOLO data set", f"{file}: no such file").data
    return data if isinstance(data, dict) else {}


def _folders(file: Path, content: Mapping[str, Any]) -> Iterator[tuple[str, Path]]:
    """Yield the split and the folders of images of each of its keys, below the file.

    Roboflow's ``../train/images`` is read as ``train/images``.
    """
    for key, split in SPLITS.items():
        names: Any = content.get(key) or []
        for name in names if isinstance(names, list) else [names]:
            joined = Path(str(content.get("path") or "")) / str(name)
            tried = (str(joined), str(name), str(name).removeprefix("../"))
            safe = (inside(file.parent, candidate) for candidate in tried)
            folders = (file.parent / path for path in safe if path is not None)
            folder = next(filter(Path.is_dir, folders), None)
            if folder is None:
                way = "move the file next to it"
                if str(name).endswith(".txt"):
                    way = f"name the folder of the images instead of a list of them, e.g. {key}: images/{key}"
                raise UserError(f"{file}: {key}: {str(name)!r} is no folder below {file.parent}; {way}")
            yield split, folder


def _labels_of(images: Path) -> Path:
    """Return the folder of labels: that of the images, with ``labels`` for the last part ``images``."""
    parts = list(images.parts)
    indices = [index for index, part in enumerate(parts) if part == "images"]
    return Path(*parts[: indices[-1]], "labels", *parts[indices[-1] + 1 :]) if indices else images


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
        if not (texts := _text_files(path, notes)):
            raise UserError(f"{path}: this folder has no text files; expected one per image, as YOLO writes them")
        lines = [line for file in texts for line in _box_lines(path, file, faults)]
        (rows, sure), places = _rows(lines), [line.where for line in lines]
        return ImageTable(table_of(rows), path, path, places, None, sure, is_share=True, faults=faults, notes=notes)


def _is_box(words: list[str]) -> bool:
    """Return whether the words of a line are a class and shares of an image."""
    numbers = _numbers(words)
    return len(numbers) >= 5 and all(-0.5 <= number <= 1.5 for number in numbers[1:5])


def _text_files(folder: Path, notes: list[str]) -> list[Path]:
    """Return the text files of labels below a folder, see `files_below`."""
    return [file for file in files_below(folder, (".txt",), notes) if file.name != CLASSES]


def _box_lines(folder: Path, file: Path, faults: list[str], words_of_box: int | None = None) -> list[BoxLine]:
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
            faults.append(f"{file}:{number}: got {quoted(line)}, expected class x y width height [confidence]")
    return boxes


def _rows(lines: list[BoxLine]) -> tuple[list[dict[str, Any]], list[float]]:
    """Return the boxes of lines as rows of a table, and their confidences."""
    # a sixth number is a confidence, or the number of a track where all of them are whole and one is above 1
    sixths = [line.words[5] for line in lines if len(line.words) == 6]
    are_tracks = all(map(str.isdecimal, sixths)) and any(float(word) > 1 for word in sixths)
    rows, sure = list[dict[str, Any]](), list[float]()
    for line in lines:
        numbers = _numbers(line.words)
        track, confidence = None, 1.0
        is_tracked = len(numbers) == 7 and line.words[6].isdecimal() and (numbers[6] > 1 or _is_inside(*numbers[1:6]))
        is_polygon = len(numbers) >= 7 and not is_tracked
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
        row: dict[str, Any] = {"path": line.name, "class_number": line.words[0], **dict(zip(BOX, sides, strict=True))}
        rows.append(row | ({} if track is None else {"group": track}))
        sure.append(confidence)
    return rows, sure


def _is_inside(x: float, y: float, width: float, height: float, confidence: float) -> bool:
    """Return whether numbers are a box in its image, with a confidence: three corners seldom are."""
    sides = x - width / 2, y - height / 2, 1 - x - width / 2, 1 - y - height / 2
    return min(*sides, width, height) >= -0.02 and 0 <= confidence <= 1


def _numbers(words: list[str]) -> list[float]:
    """Return the finite numbers of a line; none if a word is not a number."""
    try:
        return [number for word in words if abs(number := float(word)) < 1e9]
    except ValueError:
        return []
