"""Data sets of re-identification: Market-1501, DukeMTMC-reID, VeRi and MSMT17, with label and camera in the names."""

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from dmlkit.files.paths import read_lines
from dmlkit.files.readers.base import ImageTable, Reader, counted_out, table_of
from dmlkit.files.regular import EXTENSIONS

FOLDERS = ("bounding_box_train", "bounding_box_test", "query"), ("image_train", "image_test", "image_query")
"""Folders of training images, of the gallery and of the queries."""
LISTS = {"train": "list_train.txt", "val": "list_val.txt", "gallery": "list_gallery.txt", "query": "list_query.txt"}
"""Lists of MSMT17; its validation images show people of the training, and are trained on."""
NAME = re.compile(r"(-?\d+)_(c\d+)")
NAME_OF_MSMT = re.compile(r"(\d+)_\d+_(\d+)_")
JUNK = "-1"  # label of images that the protocol ignores


class MarketReader(Reader):
    """Reader of the three folders: the gallery is searched with the queries, and a group is a label of one camera.

    So are images ignored that show a query's label and come from its camera, as the protocol says. The folder may be
    the only one in the given one, as an archive leaves it.
    """

    title = "Market-1501"

    def recognizes(self, path: Path) -> bool:
        return path.is_dir() and any(map(_parts, _homes(path)))

    def read(self, path: Path) -> ImageTable:
        root = next(filter(_parts, _homes(path)))
        rows, faults, notes, junk = list[dict[str, Any]](), list[str](), list[str](), 0
        for part, pattern, prefix, name in _images(root, faults, notes):
            label, camera = match.groups() if (match := pattern.match(name.rpartition("/")[2])) else ("", "")
            if not label:
                faults.append(f"{root / name}: expected a name such as 0002_c1s1_000451_03.jpg, with label and camera")
            elif label == JUNK:
                junk += 1
            else:
                label = f"{prefix}{label}"
                row = {"path": name, "label": label, "group": f"{label}_{camera}"}
                sides = {"query": str(part == "query").lower(), "gallery": str(part == "gallery").lower()}
                rows.append(row | {"split": "train" if part in ("train", "val") else "test"} | sides)
        read = {row["path"].split("/")[0] for row in rows}
        others = [entry for entry in root.iterdir() if entry.is_dir() and entry.name not in read]
        counts = [(junk, "junk image (-1)", "junk images (-1)"), (len(others), "other folder", "other folders")]
        return ImageTable(table_of(rows), path, root, faults=faults, notes=[*notes, *counted_out(path, counts)])


def _homes(path: Path) -> Iterator[Path]:
    yield path
    with suppress(OSError):  # a folder that cannot be read is reported where its images are listed
        folders = [entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith(".")]
        yield from folders if len(folders) == 1 else []


def _parts(path: Path) -> dict[str, Path]:
    """Return the folders of a data set, or the lists of MSMT17, by what they are for; none for another folder."""
    for names in (LISTS, *(dict(zip(("train", "gallery", "query"), names, strict=True)) for names in FOLDERS)):
        parts = {part: path / name for part, name in names.items()}
        if all(place.is_dir() or place.is_file() for part, place in parts.items() if part != "val"):
            return parts
    return {}


def _images(root: Path, faults: list[str], notes: list[str]) -> Iterator[tuple[str, re.Pattern[str], str, str]]:
    """Yield what each image is for, the pattern of its name, what precedes its label, and its path below the folder.

    MSMT17 numbers the people of the training and of the test from 0.
    """
    for part, place in _parts(root).items():
        if place.is_dir():
            files = list(place.iterdir())
            images = (file.name for file in files if file.suffix.lower() in EXTENSIONS)
            names = sorted(name for name in images if not name.startswith("."))
            left_out = [(len(files) - len(names), "file that is no image", "files that are no images")]
            notes += counted_out(place, left_out)
            yield from ((part, NAME, "", f"{place.name}/{name}") for name in names)
        else:
            side = "train" if part in ("train", "val") else "test"
            folders = (entry.name for entry in sorted(root.iterdir()) if entry.is_dir() and side in entry.name)
            folder = next(folders, side)
            lines = read_lines(place, faults) if place.exists() else []
            names = [line.split()[0] for line in lines if line.strip()]
            yield from ((part, NAME_OF_MSMT, f"{side}_", f"{folder}/{name}") for name in names)
