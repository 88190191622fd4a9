"""Image files: listing them, and opening, checking and converting them with Pillow. This module imports no torch."""

import os
from collections.abc import Generator
from contextlib import contextmanager
from io import BytesIO
from math import prod
from pathlib import Path
from threading import Lock
from typing import NamedTuple

import numpy as np
from PIL import Image, UnidentifiedImageError

from dmlkit.errors import UserError
from dmlkit.files.regular import EXTENSIONS, check_regular

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF", "PPM")
"""Formats that Pillow may open; it would otherwise pass a PostScript file named .png to Ghostscript."""
MAX_PIXELS = 80_000_000  # of a decoded image; decoding takes 3 to 18 bytes for each, at most 1.4 GB
MAX_SIDE = 65_535  # that of JPEG; Pillow takes 140 bytes for each row of an image of 1 x 80 000 000 pixels

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


@contextmanager
def opened(path: str | Path, content: bytes | None = None) -> Generator[Image.Image]:
    """Open an image, from ``content`` or from the file, and read its header.

    Within the block Pillow has no limit of its own; `limit_size` refuses images that are too large.

    Raises:
        OSError: the file is missing, not regular, or of no known format.
    """
    if content == b"":
        raise OSError("the file is empty")
    if content is None:
        check_regular(path)
    with _lock:
        _limits.append(Image.MAX_IMAGE_PIXELS)
        Image.MAX_IMAGE_PIXELS = None
    try:
        with Image.open(path if content is None else BytesIO(content), formats=FORMATS) as image:
            yield image
    finally:
        with _lock:
            Image.MAX_IMAGE_PIXELS = _limits.pop()


_limits: list[int | None] = []  # one for each open image; the first is Pillow's, which other code may rely on
_lock = Lock()
if hasattr(os, "register_at_fork"):  # so that no process starts with the lock of a thread that it does not have
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


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


class Limits(NamedTuple):
    """Limits of decoding an image."""

    max_pixels: int = MAX_PIXELS
    """Largest number of decoded pixels. A JPEG of more is decoded at 1/2, 1/4 or 1/8 of its width and height."""
    least_side: int | None = None
    """Pixels that the shorter side needs: a JPEG of twice as many or more is decoded at a smaller size. None: all."""


LIMITS = Limits()


def limit_size(path: str | Path, image: Image.Image, limits: Limits, *, is_whole: bool) -> bool:
    """Let a JPEG be decoded at a smaller size where limits ask for it; return whether it will be.

    The decoder computes the mean of each block of pixels from a part of its coefficients. ``image.size`` is the decoded
    size afterwards. An image of which only a box is used is not reduced, because the box may be small.

    Raises:
        BadImageError: the image would still have too many pixels, or a side is longer than `MAX_SIDE`.
    """
    size, scale = image.size, 1
    if max(size) > MAX_SIDE:
        raise BadImageError(
            f"{path}: the image has {size[0]} x {size[1]} pixels; expected at most {MAX_SIDE:,} on a side; cut it into "
            "several images"
        )
    if is_whole and image.format in ("JPEG", "MPO"):
        while scale < 8 and limits.least_side is not None and min(size) >= 2 * scale * limits.least_side:
            scale *= 2
        while scale < 8 and prod(-(-side // scale) for side in size) > limits.max_pixels:
            scale *= 2
        image.draft(image.mode, (size[0] // scale, size[1] // scale))
    if prod(image.size) > limits.max_pixels:
        raise BadImageError(
            f"{path}: the image has {size[0]} x {size[1]} pixels; expected at most {limits.max_pixels:,}; make it "
            "smaller, or raise dataset.max_pixels in the recipe (of a run: recipe.yaml in its folder)"
        )
    return image.size != size


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
    if isinstance(error, UnidentifiedImageError):
        return (
            "the file is empty"
            if Path(path).is_file() and Path(path).stat().st_size == 0
            else f"the file has no known image format ({', '.join(FORMATS)})"
        )
    return str(error).rsplit(", ", 1)[-1]  # torchcodec puts its source line before the reason
