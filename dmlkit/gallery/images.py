"""Images for a gallery: their files, labels and ids by content."""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dmlkit.datasets.files.boxes import Boxes
from dmlkit.errors import UserError
from dmlkit.files.image_file import Box, decoding
from dmlkit.files.image_table import BOX, LABEL, SIGHTING, sighting_cells
from dmlkit.files.labels import stated_label
from dmlkit.files.paths import raise_faults, readable_name, unreadable_name
from dmlkit.files.regular import check_regular
from dmlkit.files.where import cells_of, row_texts
from dmlkit.run_folder.folder import RunFolder
from dmlkit.vectors.images import NONE, images_at, label_depth, listed_images

ID_LENGTH = 32  # hexadecimal digits, 128 bits: no two of 10^15 images share one by chance


@dataclass(frozen=True)
class LabelledImage:
    """Image file, or a box of it, for a gallery."""

    path: str
    label: str | None
    box: Box | None = None
    cells: str | None = None
    """Other columns of its row in a table, see `row_texts`; a time and a place are among them."""

    def id(self) -> str:
        """Return a hash of the contents of the file, and of the box."""
        with decoding(self.path):
            check_regular(self.path)
            digest = hashlib.sha256(Path(self.path).read_bytes())
        if self.box is not None:
            digest.update(self.box.text.encode())
        return digest.hexdigest()[:ID_LENGTH]


def images_of(
    source: Path, label: str | None, boxes: Boxes | None = None, run: Path | None = None
) -> tuple[list[LabelledImage], Sequence[str]]:
    """Return the images of a file, a folder or a table, and messages on wrong entries, see `images_at`.

    Args:
        label: label of all images instead of their own, see `stated_label`.
        run: run that embeds them, whose levels name the folders of a label, see `label_depth`.
    """
    run_folder = None if run is None else RunFolder(run)
    depth = label_depth(run_folder.recipe()) if run_folder is not None and run_folder.recipe_path.exists() else 1
    options = (boxes or Boxes())._replace(skips=True)
    labels = None if label is None else NONE
    listed = listed_images(source, labels, options, depth=depth)
    table, images = listed or (None, images_at(source, labels, boxes, depth=depth))
    raise_faults(unreadable_name(path) for path in images.paths if not readable_name(path))
    names = images.label_names(images.labels)
    if label is not None:
        names = [stated_label(label, "--label")] * len(images)
    if table is not None and options.source is None and not any(names):
        raise UserError(f"{source}: no image has a label; fill the column label, or state one with --label")
    columns: Any = {}
    if table is not None:
        columns = {name: table.table[name] for name in table.table.column_names if name not in ("path", LABEL, *BOX)}
        if columns.keys() & {*SIGHTING}:
            columns |= zip(SIGHTING, zip(*sighting_cells(table), strict=True), strict=True)
    cells = row_texts(cells_of(columns), len(images))
    labeled = [
        LabelledImage(os.path.abspath(path), name, images.box(row), text)  # noqa: PTH100 - links are not followed
        for row, (path, name, text) in enumerate(zip(images.paths, names, cells, strict=True))
    ]
    return labeled, images.left_out
