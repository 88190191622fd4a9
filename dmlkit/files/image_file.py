"""Image files: listing them, and opening, checking and converting them with Pillow. This module imports no torch."""

import os
from collections.abc import Generator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, UnidentifiedImageError

from dmlkit.errors import UserError
from dmlkit.files.regular import EXTENSIONS, check_regular

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF", "PPM")
"""Formats that Pillow may open; it would otherwise pass a PostScript file named .png to Ghostscript."""
MAX_PIXELS = 80_000_000  # just below the 89 M at which Pillow warns of a decompression bomb

if "PILLOW_BLOCKS_MAX" not in os.environ:
    Image.core.set_blocks_max(1)  # keeps the memory of the last image: 2.1 instead of 6.0 ms for 1024 x 768 pixels


class Box(NamedTuple):
    """Box of an upright image, in pixels; right and bottom are exclusive."""

    left: float
    top: float
    right: float
    bottom: float
    margin: float = 0.0
    """Margin on each side, as a share of the width or height, as far as the image has pixels there."""

    @property
    def sides(self) -> str:
        """Sides as people write them.

        Example:
            >>> Box(0.0, 4.25, 8.0, 6.0).sides
            'box 0 4.25 8 6'
        """
        return " ".join(["box", *(f"{side:.6g}" for side in self[:4])])

    @property
    def text(self) -> str:
        """Text that distinguishes boxes.

        Example:
            >>> Box(0.0, 0.0, 8.0, 6.0).text, Box(0.0, 0.0, 8.0, 6.0, 0.1).text
            ('(0.0, 0.0, 8.0, 6.0)', '(0.0, 0.0, 8.0, 6.0) margin 0.1')
        """
        sides = str(tuple(map(float, self[:4])))
        return f"{sides} margin {self.margin:g}" if self.margin else sides


def box_cell(box: Box | None) -> str | None:
    """Return a box as galleries keep it, as text.

    Example:
        >>> box_cell(Box(0.0, 4.25, 8.0, 6.0)), box_of_cell("0.0 4.25 8.0 6.0 0.0")
        ('0.0 4.25 8.0 6.0 0.0', Box(left=0.0, top=4.25, right=8.0, bottom=6.0, margin=0.0))
    """
    return None if box is None else " ".join(str(float(number)) for number in box)


def box_of_cell(cell: str | None) -> Box | None:
    """Return the box of a cell, see `box_cell`."""
    return None if cell is None else Box(*(float(number) for number in cell.split()))


class BadImageError(UserError):
    """Error for an image file that cannot be read."""


def opened(path: str | Path, content: bytes | None = None) -> Image.Image:
    """Open an image, from ``content`` or from the file, and read its header.

    Raises:
        OSError: the file is missing, not regular, or of no known format.
    """
    if content == b"":
        raise OSError("the file is empty")
    if content is not None:
        return Image.open(BytesIO(content), formats=FORMATS)
    check_regular(path)
    return Image.open(path, formats=FORMATS)


@contextmanager
def decoding(path: str | Path) -> Generator[None]:
    """Convert errors of reading and decoding an image file into a `BadImageError` of one line."""
    try:
        yield
    except (BadImageError, MemoryError):
        raise
    except Exception as error:  # decoders raise many kinds for damaged files, TypeError and struct.error too
        raise BadImageError(f"{path}: cannot read this image: {_reason(path, error)}") from error


def check_image_file(path: Path) -> None:
    """Raise a `BadImageError` unless a file has the header of an image, before a model is loaded for it."""
    try:
        with decoding(path), opened(path):
            pass
    except BadImageError as error:
        if path.suffix.lower() in EXTENSIONS:
            raise
        raise BadImageError(f"{error}; expected an image, a folder of images, or a table (.csv or .parquet)") from error


def check_size(path: str | Path, image: Image.Image) -> None:
    """Raise a `BadImageError` if an image has more than 80 megapixels."""
    if image.width * image.height > MAX_PIXELS:
        raise BadImageError(
            f"{path}: the image has {image.width} x {image.height} pixels; expected at most {MAX_PIXELS:,}"
        )


def shrink(image: Image.Image, least_side: int) -> bool:
    """Let a JPEG be decoded at 1/8, 1/4 or 1/2 of its size, if the shorter side keeps ``least_side`` pixels.

    Return whether it will be smaller. The decoder computes the mean of each block of pixels from a part of its
    coefficients.
    """
    width, height = image.size
    shorter = min(width, height)
    if image.format != "JPEG" or shorter < 2 * least_side:
        return False
    image.draft(image.mode, (-(-width * least_side // shorter), -(-height * least_side // shorter)))
    return image.size != (width, height)


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert a Pillow image to 8-bit RGB."""
    if image.mode.startswith("I"):  # Pillow clips 16 bits to 255 instead of scaling them
        image = Image.fromarray((np.asarray(image).clip(0, 65535) // 256).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


def image_files(folder: Path, *, images: bool = True) -> list[str]:
    """Return the image files below a folder, sorted, without hidden ones; or instead those that are not ``images``.

    Links to folders are followed. Each folder is visited once, so that circular links end.

    Raises:
        UserError: a subfolder cannot be read.
    """
    found: list[str] = []
    seen: set[tuple[int, int]] = set()
    for directory, folders, files in os.walk(folder, onerror=_refuse_folder, followlinks=True):
        status = os.stat(directory)  # noqa: PTH116 - as below
        if (status.st_dev, status.st_ino) in seen:
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [
            os.path.join(directory, name)  # noqa: PTH118 - Path takes 10 s for a million files
            for name in sorted(files)
            if not name.startswith(".") and (os.path.splitext(name)[1].lower() in EXTENSIONS) == images  # noqa: PTH122
        ]
    return found


def _refuse_folder(error: OSError) -> None:
    raise UserError(
        f"{error.filename}: cannot read this folder: {error.strerror}; change its permissions or move it elsewhere"
    ) from error


def _reason(path: str | Path, error: Exception) -> str:
    """Return a short reason why an image could not be read."""
    if isinstance(error, FileNotFoundError):
        return "file not found"
    if isinstance(error, Image.DecompressionBombError):  # already at its header, before `check_size`
        return f"it has far more than the {MAX_PIXELS:,} pixels that are expected at most"
    if isinstance(error, UnidentifiedImageError):
        return (
            "the file is empty"
            if Path(path).is_file() and Path(path).stat().st_size == 0
            else f"the file has no known image format ({', '.join(FORMATS)})"
        )
    return str(error).rsplit(", ", 1)[-1]  # torchcodec puts its source line before the reason
