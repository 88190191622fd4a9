"""Image files: listing them, and opening, checking and converting them with Pillow. This module imports no torch."""

import os
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from io import BytesIO
from math import prod
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from dmlkit.errors import MOST_NAMED, UserError, counted, warn_once
from dmlkit.files.regular import EXTENSIONS, HEIC, RAW, check_regular, other_content, read_start

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF", "PPM", "AVIF", "JPEG2000")
"""Formats that Pillow may open; it would otherwise pass a PostScript file named .png to Ghostscript."""
HEIF = () if find_spec("pillow_heif") is None else ("HEIF",)
if HEIF:
    import_module("pillow_heif").register_heif_opener()
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
    """
    if os.path.splitext(path)[1].lower() in RAW:  # noqa: PTH122 - Path takes five times as long
        raise BadImageError(
            f"{path}: this is a raw camera file; develop it to a JPEG or TIFF, or use the JPEG that the camera made"
        )
    if content is None:
        check_regular(path)
    with _lock:
        _limits.append(Image.MAX_IMAGE_PIXELS)
        Image.MAX_IMAGE_PIXELS = None
    try:
        with _identified(path, content) as image:
            yield image
    finally:
        with _lock:
            Image.MAX_IMAGE_PIXELS = _limits.pop()


def _identified(path: str | Path, content: bytes | None) -> Image.Image:
    try:
        return Image.open(path if content is None else BytesIO(content), formats=FORMATS + HEIF)
    except UnidentifiedImageError as error:
        start = read_start(Path(path), 512) if content is None else content[:512]
        if not start:
            raise OSError("the file is empty") from error
        is_zip = start.startswith(b"PK\3\4")
        unknown = f"the file has no known image format ({', '.join(FORMATS + HEIF)})"
        reason = other_content(start) or ("this is a ZIP archive; unpack it" if is_zip else unknown)
        raise BadImageError(f"{path}: cannot read this image: {reason}") from error


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
        # torchcodec puts its source line before the reason
        reason = "file not found" if isinstance(error, FileNotFoundError) else str(error).rsplit(", ", 1)[-1]
        raise BadImageError(f"{path}: cannot read this image: {reason}") from error


def upright_size(path: str | Path) -> tuple[int, int]:
    """Return the width and height of an image file after its EXIF rotation, from its header.

    Errors of decoders are not converted; see `decoding`.
    """
    with opened(path) as image:
        # 5 and above: by 90 degrees; Pillow gives the size of a TIFF as it is upright
        is_turned = image.format != "TIFF" and image.getexif().get(ExifTags.Base.Orientation, 1) >= 5
        return (image.height, image.width) if is_turned else image.size


def limit_size(path: str | Path, image: Image.Image, max_pixels: int, *, is_whole: bool) -> bool:
    """Let a JPEG of more pixels be decoded at 1/2, 1/4 or 1/8 of its width and height; return whether it will be.

    The decoder computes the mean of each block of pixels from a part of its coefficients. ``image.size`` is the decoded
    size afterwards. An image of which only a box is used is not reduced, because the box may be small.
    """
    size, scale = image.size, 1
    if max(size) > MAX_SIDE:
        raise BadImageError(
            f"{path}: the image has {size[0]} x {size[1]} pixels; expected at most {MAX_SIDE:,} on a side; cut it into "
            "several images"
        )
    if is_whole and image.format in ("JPEG", "MPO"):
        while scale < 8 and prod(-(-side // scale) for side in size) > max_pixels:
            scale *= 2
        image.draft(image.mode, (size[0] // scale, size[1] // scale))
    if prod(image.size) > max_pixels:
        raise BadImageError(
            f"{path}: the image has {size[0]} x {size[1]} pixels; expected at most {max_pixels:,}; make it "
            "smaller, or raise dataset.max_pixels in the recipe (of a run: recipe.yaml in its folder)"
        )
    return image.size != size


def to_rgb(
    path: str | Path,
    image: Image.Image,
    crop: Callable[[Image.Image], Image.Image] = lambda image: image,
    *,
    in_place: bool = True,
) -> np.ndarray:
    """Return the pixels (H, W, 3) uint8 RGB of a Pillow image, upright.

    Gray values of more than 8 bits are divided by the range that the file declares (12 bits of TIFF, PPM's largest
    value, the bits of JPEG 2000), or else by that of 16 bits. Floats are from 0 to 1. So the brightness of an image
    depends on no other image, nor on its own brightest pixel.

    Args:
        image: the image, best before its pixels are read, since the file's bits are unknown afterwards.
        crop: cuts a part out of the upright image.
        in_place: whether the image may be changed, which saves a copy.

    Raises:
        BadImageError: a value is outside of the range; or all are below a 16th of a range that the file does not
            declare, which is probably not that of its values.
    """
    stored = _stored_mode(image)
    is_negative = image.mode.startswith("I;16") and getattr(image, "tag_v2", {}).get(PHOTOMETRIC) == 0
    if in_place:
        ImageOps.exif_transpose(image, in_place=True)
    else:
        image = ImageOps.exif_transpose(image)
    if image.mode[0] in "IF":
        image = _scaled(path, image, stored, is_negative=is_negative)
    elif ";16" in stored and image.format in ("PNG", "TIFF"):  # Pillow keeps the upper 8 bits of each channel
        extrema: Any = image.getextrema()
        _check_range(path, max(high for _, high in extrema[:3]) * 256 + 255, 65535)
    image = crop(image)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return np.array(image if image.mode == "RGB" else image.convert("RGB"))


PHOTOMETRIC = 262  # tag of a TIFF: 0 if the smallest value is white


def _stored_mode(image: Image.Image) -> str:
    """Return how a file stores the pixels of an image that is not read yet, as Pillow names it: ``RGB;16B``."""
    tiles: Any = getattr(image, "tile", None)
    if not tiles:
        return ""
    stored = tiles[0][3]
    return stored if isinstance(stored, str) else str(stored[0]) if stored else ""


def _scaled(path: str | Path, image: Image.Image, stored: str, *, is_negative: bool) -> Image.Image:
    """Return an image of 16-bit, 32-bit or floating-point gray values in 8 bits."""
    values = np.asarray(image)
    white = 1 if image.mode == "F" else 4095 if stored == "I;12" else 65535
    low, high = values.min(), values.max()
    if not (low >= 0 and high <= white):  # also nan
        raise BadImageError(
            f"{path}: the values of its pixels are from {low:g} to {high:g}; expected 0, black, to {white}, white; "
            "scale them, or convert the image to 8 bits"
        )
    if white != 4095 and image.format not in ("PPM", "JPEG2000"):
        _check_range(path, high, white)
    if is_negative:
        values = white - values
    return Image.fromarray((np.rint(values * 255) if white == 1 else values // ((white + 1) // 256)).astype(np.uint8))


def _check_range(path: str | Path, high: float, white: int) -> None:
    """Raise a `BadImageError` if the brightest of 12 or 16 bits would be nearly black."""
    if 0 < high < white / 16:
        raise BadImageError(
            f"{path}: the values of its pixels are at most {high:g} of {white}, so that it would be nearly black; "
            f"scale them to 0 to {white}, or convert the image to 8 bits"
        )


class LeftOut:
    """Files that walks over the folders below a root leave out, by reason."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.counts: Counter[str] = Counter()
        self.examples: dict[str, str] = {}

    def add(self, path: str, reason: str = "") -> None:
        """Count a file or a folder. Default of the reason: its name, if it is not that of an image."""
        reason = reason or reason_left_out(path)
        self.counts[reason] += 1
        self.examples.setdefault(reason, path)

    @property
    def message(self) -> str:
        """One line: how many files are left out, and for what reasons, those of images first; empty without any."""
        ranks = {reason: ("(" not in reason and reason != OUTSIDE, -count) for reason, count in self.counts.items()}
        reasons = sorted(ranks, key=lambda reason: (ranks[reason], reason))
        examples = {reason: os.path.relpath(path, self.root) for reason, path in self.examples.items()}
        lines = [f"{self.counts[reason]:,} {reason}, e.g. {examples[reason]}" for reason in reasons[:MOST_NAMED]]
        if remaining := sum(self.counts[reason] for reason in reasons[MOST_NAMED:]):
            lines.append(f"{remaining:,} more")
        files = counted(self.counts.total(), "file is", "files are")
        return f"{self.root}: {files} left out: {'; '.join(lines)}" if lines else ""


OUTSIDE = "in no class folder"
"""Reason to leave out an image."""


def reason_left_out(path: str) -> str:
    """Return why a file is no image, by its name.

    Example:
        >>> reason_left_out("a/.cache"), reason_left_out("a/README"), reason_left_out("a/1.CSV")
        ('hidden', 'without a suffix', '.csv')
        >>> reason_left_out("a/1.NEF")
        '.nef (raw; develop it to JPEG or TIFF)'
    """
    name = path[path.rfind(os.sep) + 1 :]
    if name.startswith("."):
        return "hidden"
    suffix = os.path.splitext(name)[1].lower()  # noqa: PTH122 - as in image_files
    if suffix in HEIC:
        return f"{suffix} (needs pillow-heif: pip install pillow-heif)"
    return f"{suffix} (raw; develop it to JPEG or TIFF)" if suffix in RAW else suffix or "without a suffix"


def image_files(folder: Path, left_out: LeftOut | None = None) -> list[str]:
    """Return the image files below a folder, sorted, without hidden ones; count the others in ``left_out``.

    Links to folders are followed. Each folder is visited once, so that circular links end.
    """
    left_out = left_out or LeftOut(folder)
    paths: list[str] = []
    seen: set[tuple[int, int]] = set()
    for directory, folders, files in os.walk(folder, onerror=_refuse_folder, followlinks=True):
        status = os.stat(directory)  # noqa: PTH116 - as below
        if (status.st_dev, status.st_ino) in seen:
            folders.clear()
            left_out.add(directory, "second link to a folder")
            continue
        seen.add((status.st_dev, status.st_ino))
        shown = sorted(name for name in folders if not name.startswith("."))
        images = sorted(
            name
            for name in files
            if not name.startswith(".") and os.path.splitext(name)[1].lower() in EXTENSIONS  # noqa: PTH122
        )
        paths += [os.path.join(directory, name) for name in images]  # noqa: PTH118 - Path takes 10 s for a million files
        if len(shown) < len(folders):
            for name in sorted({*folders}.difference(shown)):
                left_out.add(os.path.join(directory, name), "hidden folder")  # noqa: PTH118
        if len(images) < len(files):
            for name in sorted({*files}.difference(images)):
                left_out.add(f"{directory}{os.sep}{name}", reason_left_out(name))
        folders[:] = shown
    return paths


def some_image_files(folder: Path) -> list[str]:
    """Return the image files below a folder, see `image_files`; warn of the files that are left out."""
    left_out = LeftOut(folder)
    paths = image_files(folder, left_out)
    if not paths:
        others = f"; {left_out.message.removeprefix(f'{folder}: ')}" if left_out.counts else ""
        if not left_out.counts.keys().isdisjoint((".parquet", ".arrow")):
            others += "; dmlkit data convert saves images that are stored in such files"
        raise UserError(f"{folder}: no images found in this folder or below it{others}")
    if left_out.counts:
        warn_once(left_out.message)
    return paths


def _refuse_folder(error: OSError) -> None:
    raise UserError(
        f"{error.filename}: cannot read this folder: {error.strerror}; change its permissions or move it elsewhere"
    ) from error
