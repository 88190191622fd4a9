"""Data sets of re-identification: Market-1501, DukeMTMC-reID and VeRi, with label and camera in the names of images."""

import re
from pathlib import Path
from typing import Any

from dmlkit.files.readers.base import ImageTable, Reader, counted_out, table_of
from dmlkit.files.regular import EXTENSIONS

FOLDERS = ("bounding_box_train", "bounding_box_test", "query"), ("image_train", "image_test", "image_query")
"""Folders of training images, of the gallery and of the queries."""
NAME = re.compile(r"(-?\d+)_(c\d+)")
JUNK = "-1"  # label of images that the protocol ignores


class MarketReader(Reader):
    """Reader of the three folders: the gallery is searched with the queries, and a group is a label of one camera.

    So are images ignored that show a query's label and come from its camera, as the protocol says.
    """

    title = "Market-1501"

    def recognizes(self, path: Path) -> bool:
        return any(all((path / name).is_dir() for name in names) for names in FOLDERS)

    def read(self, path: Path) -> ImageTable:
        names = next(names for names in FOLDERS if all((path / name).is_dir() for name in names))
        rows, faults, junk = list[dict[str, Any]](), list[str](), 0
        for folder in names:
            split = "train" if folder == names[0] else "test"
            for file in sorted(one for one in (path / folder).iterdir() if one.suffix.lower() in EXTENSIONS):
                parts = NAME.match(file.name)
                if parts is None:
                    faults.append(f"{file}: expected a name such as 0002_c1s1_000451_03.jpg, with label and camera")
                elif parts[1] == JUNK:
                    junk += 1
                else:
                    row = {"path": f"{folder}/{file.name}", "label": parts[1], "group": f"{parts[1]}_{parts[2]}"}
                    sides = {"query": str(folder == names[2]).lower(), "gallery": str(folder == names[1]).lower()}
                    rows.append(row | {"split": split} | sides)
        others = sorted(one.name for one in path.iterdir() if one.is_dir() and one.name not in names)
        counts = [(junk, "junk image (-1)", "junk images (-1)"), (len(others), "other folder", "other folders")]
        return ImageTable(table_of(rows), path, path, faults=faults, notes=counted_out(path, counts))
