"""Thumbnails of images for HTML pages."""

from io import BytesIO
from pathlib import Path

from PIL import Image
from torch import Tensor

from dmlkit.datasets.files.image import Box, read_image

SIDE = 160  # pixels of the longer side; as JPEG about 5 kB
QUALITY = 80


def thumbnail(path: str | Path, box: Box | None = None, side: int = SIDE) -> bytes:
    """Return an image file, or a box of it, as a small JPEG.

    Raises:
        BadImageError: see `read_image`.
    """
    return small_picture(read_image(path, box), side)


def small_picture(pixels: Tensor, side: int = SIDE) -> bytes:
    """Return an image (3, H, W) uint8 as a JPEG whose longer side has at most ``side`` pixels."""
    image = Image.fromarray(pixels.permute(1, 2, 0).numpy())
    image.thumbnail((side, side))
    file = BytesIO()
    image.save(file, "JPEG", quality=QUALITY)
    return file.getvalue()
