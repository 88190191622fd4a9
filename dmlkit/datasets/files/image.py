"""Decoding image files of any kind to RGB, also those within tar files."""

from collections.abc import Generator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from dmlkit.datasets.files.dataset import BadImageError
from dmlkit.datasets.files.tar.member import content_in_shard
from dmlkit.files.regular import check_regular

EXTENSIONS = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".ppm", ".pgm"})
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF", "PPM")
"""What the extensions stand for. Pillow opens no other: it would hand a PostScript called .png to Ghostscript."""
MAX_PIXELS = 80_000_000  # just below the 89 M at which Pillow warns of a decompression bomb

Box = tuple[float, float, float, float]
"""Left, top, right and bottom in pixels of the upright image; right and bottom lie outside."""


def read_image(path: str | Path, box: Box | None = None) -> Tensor:
    """Decode an image file, or a box of it, to (3, H, W) uint8 RGB, upright.

    Grey, palette, CMYK and 16-bit images are converted, transparency is laid on white, the EXIF rotation is
    applied, and of an animation the first frame is taken.

    Args:
        path: the file; ``SHARD.tar/KEY.jpg`` is one within a tar file.
        box: what to take of it; None for all.

    Raises:
        BadImageError: the file is missing, not regular, empty, broken, truncated, larger than 80 megapixels, or no
            image, or the box does not lie in it.
    """
    with decoding(path):
        return decode_image(path, content_in_shard(str(path)), box)


def decode_image(path: str | Path, content: bytes | None, box: Box | None) -> Tensor:
    """As `read_image`, of what a file holds, or None to read it; decoders' errors are as they come, see `decoding`."""
    with opened(path, content) as image:
        if image.width * image.height > MAX_PIXELS:
            raise BadImageError(f"{path}: {image.width} x {image.height} pixels; expected at most {MAX_PIXELS:,}")
        if image.format == "JPEG" and image.mode == "RGB" and box is None:
            return read_jpeg(path, content)
        upright = ImageOps.exif_transpose(image)
        pixels = np.asarray(to_rgb(upright if box is None else crop_box(upright, box, path)))
    return torch.from_numpy(pixels.copy()).permute(2, 0, 1)


def opened(path: str | Path, content: bytes | None) -> Image.Image:
    """An image, of which the header is read: of a file, or of what it holds.

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
    """Tell what goes wrong with an image file in the block as one line.

    Raises:
        BadImageError: it cannot be read, or its decoder objects.
    """
    try:
        yield
    except (BadImageError, MemoryError):
        raise
    except Exception as error:  # decoders raise many kinds for damaged files, TypeError and struct.error too
        raise BadImageError(f"{path}: cannot read this image: {reason(path, error)}") from error


def read_jpeg(path: str | Path, content: bytes | None) -> Tensor:
    """A colour JPEG by torchvision's decoder, which gives Pillow's pixels in three quarters of the time."""
    from torchvision.io import ImageReadMode, decode_jpeg, read_file

    # a bytearray, since torch warns of bytes that it cannot write to
    data = read_file(str(path)) if content is None else torch.frombuffer(bytearray(content), dtype=torch.uint8)
    decoded = decode_jpeg(data, ImageReadMode.RGB, apply_exif_orientation=True)
    assert isinstance(decoded, Tensor)  # a list only for a list of files
    return decoded


def crop_box(image: Image.Image, box: Box, path: str | Path) -> Image.Image:
    """What an image shows in a box, to whole pixels.

    Raises:
        BadImageError: the box is empty or reaches beyond the image.
    """
    left, top, right, bottom = (round(side) for side in box)
    if not (0 <= left < right <= image.width and 0 <= top < bottom <= image.height):
        raise BadImageError(
            f"{path}: the box ({left}, {top}, {right}, {bottom}) does not lie in the {image.width} x {image.height} "
            "image; expected left < right and top < bottom in pixels"
        )
    return image.crop((left, top, right, bottom))


def reason(path: str | Path, error: Exception) -> str:
    """Why an image could not be read, in a few words."""
    if isinstance(error, FileNotFoundError):
        return "file not found"
    if isinstance(error, UnidentifiedImageError):
        return (
            "the file is empty"
            if Path(path).is_file() and Path(path).stat().st_size == 0
            else f"it is of no known image format ({', '.join(FORMATS)})"
        )
    return str(error).rsplit(", ", 1)[-1]  # torchvision puts the line of its source before it


def to_rgb(image: Image.Image) -> Image.Image:
    """Any Pillow image as 8-bit RGB."""
    if image.mode.startswith("I"):  # Pillow clips 16 bits to 255 instead of scaling them
        image = Image.fromarray((np.asarray(image).clip(0, 65535) // 256).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert("RGB")


def frames(path: str | Path) -> int:
    """How many frames an image file has; more than one is an animation, or pages.

    Raises:
        BadImageError: a later frame is broken.
    """
    with decoding(path), opened(path, content_in_shard(str(path))) as image:
        return getattr(image, "n_frames", 1)
