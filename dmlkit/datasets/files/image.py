"""Decoding of image files to RGB, also of images inside tar files."""

import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from dmlkit.datasets.files.dataset import BadImageError, Box
from dmlkit.datasets.files.samples import SIDE, ImageSamples
from dmlkit.datasets.files.tar import content_in_shard
from dmlkit.files.regular import check_regular

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF", "PPM")
"""Formats that Pillow may open; it would otherwise pass a PostScript file named .png to Ghostscript."""
MAX_PIXELS = 80_000_000  # just below the 89 M at which Pillow warns of a decompression bomb

if "PILLOW_BLOCKS_MAX" not in os.environ:
    Image.core.set_blocks_max(1)  # keeps the memory of the last image: 2.1 instead of 6.0 ms for 1024 x 768 pixels


def read_image(path: str | Path, box: Box | None = None) -> Tensor:
    """Decode an image file, or a box of it, to (3, H, W) uint8 RGB, upright.

    Gray, palette, CMYK and 16-bit images are converted, transparent pixels are blended with white, the EXIF rotation is
    applied, and an animation gives its first frame.

    Args:
        path: image file; ``SHARD.tar/KEY.jpg`` is a file inside a tar file.
        box: box to crop; None for the full image.

    Raises:
        BadImageError: the file is missing, not regular, empty, damaged, truncated, larger than 80 megapixels, or not
            an image, or the box is not inside the image.
    """
    with decoding(path):
        return decode_image(path, content_in_shard(str(path)), box)


def decode_image(path: str | Path, content: bytes | None, box: Box | None) -> Tensor:
    """Decode an image like `read_image`, from ``content`` or, if that is None, from the file.

    Errors of decoders are not converted; see `decoding`.
    """
    with opened(path, content) as image:
        if image.width * image.height > MAX_PIXELS:
            raise BadImageError(
                f"{path}: the image has {image.width} x {image.height} pixels; expected at most {MAX_PIXELS:,}"
            )
        if image.format == "JPEG" and image.mode == "RGB" and box is None and (decode_jpeg := jpeg_decoder()):
            encoded = Path(path).read_bytes() if content is None else content
            # a bytearray, because torch warns about read-only bytes
            return decode_jpeg(torch.frombuffer(bytearray(encoded), dtype=torch.uint8))
        ImageOps.exif_transpose(image, in_place=True)
        pixels = np.array(to_rgb(image if box is None else crop_box(image, box, path)))
    return torch.from_numpy(pixels).permute(2, 0, 1)


@cache
def jpeg_decoder() -> Callable[[Tensor], Tensor] | None:
    """Return torchcodec's decoder of color JPEGs, or None where it is not installed or does not load.

    Its pixels, its use of the EXIF rotation and the damage that it accepts are Pillow's. It takes 0.53 instead of
    0.62 ms for 500 x 375 pixels and 1.6 instead of 2.1 ms for 1024 x 768 (one core).
    """
    try:
        return import_module("torchcodec.decoders").decode_jpeg
    except (ImportError, AttributeError, OSError, RuntimeError):  # also one before 0.16, or for another build of torch
        return None


def opened(path: str | Path, content: bytes | None) -> Image.Image:
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
    """Convert errors of reading an image file into one-line errors.

    Raises:
        BadImageError: the file cannot be read or decoded.
    """
    try:
        yield
    except (BadImageError, MemoryError):
        raise
    except Exception as error:  # decoders raise many kinds for damaged files, TypeError and struct.error too
        raise BadImageError(f"{path}: cannot read this image: {reason(path, error)}") from error


def crop_box(image: Image.Image, box: Box, path: str | Path) -> Image.Image:
    """Crop an image to a box and its margin, rounded to integer pixels.

    Raises:
        BadImageError: the box is empty or extends beyond the image.
    """
    left, top, right, bottom = (round(side) for side in box[:4])
    if not (0 <= left < right <= image.width and 0 <= top < bottom <= image.height):
        raise BadImageError(
            f"{path}: the box ({left}, {top}, {right}, {bottom}) is not inside the {image.width} x {image.height} "
            "image; expected left < right and top < bottom in pixels"
        )
    across, down = box.margin * (box.right - box.left), box.margin * (box.bottom - box.top)
    return image.crop(
        (
            max(0, round(box.left - across)),
            max(0, round(box.top - down)),
            min(image.width, round(box.right + across)),
            min(image.height, round(box.bottom + down)),
        )
    )


def upright_size(path: str | Path) -> tuple[int, int]:
    """Return the width and height of an image file after its EXIF rotation, from its header.

    Errors of decoders are not converted; see `decoding`.
    """
    with opened(path, content_in_shard(str(path))) as image:
        is_turned = image.getexif().get(ExifTags.Base.Orientation, 1) >= 5  # by 90 degrees
        return (image.height, image.width) if is_turned else image.size


def reason(path: str | Path, error: Exception) -> str:
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


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert a Pillow image to 8-bit RGB."""
    if image.mode.startswith("I"):  # Pillow clips 16 bits to 255 instead of scaling them
        image = Image.fromarray((np.asarray(image).clip(0, 65535) // 256).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


def frames(path: str | Path) -> int:
    """Return the number of frames of an image file; an animation or a multi-page file has more than one.

    Raises:
        BadImageError: a later frame is damaged.
    """
    with decoding(path), opened(path, content_in_shard(str(path))) as image:
        return getattr(image, "n_frames", 1)


def thumbnail(path: str | Path, box: Box | None = None, side: int = SIDE) -> bytes:
    """Return an image file, or a box of it, as a small JPEG.

    Raises:
        BadImageError: see `read_image`.
    """
    return ImageSamples().picture(read_image(path, box), side)
