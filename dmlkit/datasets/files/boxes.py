"""Options on how images are read, and the check of the boxes of tables against their images."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from dmlkit.datasets.files.dataset import Dataset
from dmlkit.datasets.files.image import fitted
from dmlkit.errors import UserError, merged
from dmlkit.files.image_file import BadImageError, decoding, upright_size
from dmlkit.files.where import Where


class Boxes(NamedTuple):
    """Options on how images are read: their boxes, and the columns of a table."""

    source: Path | None = None
    """File or folder that lists boxes, see `dmlkit.files.image_table.read_images`. None: a table of images has them."""
    margin: float = 0.0
    """Margin on each side, as a share of the box's width or height; it ends at the border of the image."""
    confidence: float | None = None
    """Boxes that a detector is less sure of are left out. Default: 0.2."""
    skips: bool = False
    """Leave out entries that are wrong, as images that cannot be read, instead of refusing them."""
    columns: Mapping[str, str] = MappingProxyType({})
    """Names of columns of a table by dmlkit's names, see `dmlkit.files.image_table.read_images`."""
    root: Path | None = None
    """Folder that the paths of a table are relative to. Default: that of the table."""
    where: Where | None = None
    """Conditions on the rows of what is searched, and of a table of images that has their columns; others are left
    out."""

    def given(self) -> dict[str, object]:
        """Return the options that apply to images alone; those with an empty value were not given."""
        return {
            "--boxes": self.source,
            "--box-margin": self.margin,
            "--box-confidence": "" if self.confidence is None else f"{self.confidence:g}",
            "--column": [f"{name}={column}" for name, column in self.columns.items()],
            "--root": self.root,
        }

    @property
    def option(self) -> str:
        """Name of the first of these options that was given; empty if none was."""
        return next((name for name, value in self.given().items() if value), "")

    def check(self) -> None:
        """Raise a `UserError` if a number is out of its range."""
        if not 0 <= self.margin <= 10:
            raise UserError(f"--box-margin {self.margin:g}: expected a share of the box from 0 to 10, e.g. 0.1")
        if self.confidence is not None and not 0 <= self.confidence <= 1:
            raise UserError(f"--box-confidence {self.confidence:g}: expected a number from 0 to 1, e.g. 0.2")


def box_faults(dataset: Dataset) -> dict[int, str]:
    """Check the boxes of a table's images against their sizes, and return what is wrong with some of them.

    A box that exceeds its image by at most a pixel is cut at the border. An image that cannot be read is left to the
    command that reads it.
    """
    if dataset.boxes is None:
        return {}
    faults, sizes, boxes = dict[int, str](), dict[str, tuple[int, int] | None](), dataset.boxes.copy()
    for row, path in enumerate(dataset.paths):
        if (box := dataset.box(row)) is None:
            continue
        if path not in sizes:
            sizes[path] = None
            with suppress(BadImageError), decoding(path):
                sizes[path] = upright_size(path)
        left, top, right, bottom = (round(side) for side in box[:4])
        if (size := sizes[path]) is None or (0 <= left < right <= size[0] and 0 <= top < bottom <= size[1]):
            continue  # a box that is inside after rounding keeps its numbers, of which ids of galleries are made
        try:
            boxes[row] = fitted(box[:4], path, *size)[:4]
        except BadImageError as error:
            faults[row] = str(error)
    dataset.boxes = boxes
    return faults


def refuse_entries(source: str, faults: Sequence[str], way: str) -> None:
    """Raise a `UserError` with a line per kind of problem of the entries of a file, if there are any."""
    lines = merged(faults)
    if len(lines) == 1:
        raise UserError(f"{lines[0]}; correct such entries, or {way}")
    if lines:
        raise UserError("\n".join([f"{source}: {len(faults):,} entries are wrong; correct them, or {way}:", *lines]))
