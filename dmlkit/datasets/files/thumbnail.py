"""Small pictures of images, for pages that people look at."""

from io import BytesIO
from pathlib import Path

from PIL import Image

from dmlkit.datasets.files.image import Box, read_image

SIDE = 160  # pixels of the longer side; as JPEG about 5 kB
QUALITY = 80


def thumbnail(path: str | Path, box: Box | None = None) -> bytes:
    """An image file, or a box of it, as a small JPEG.

    Raises:
        BadImageError: see `read_image`.
    """
    image = Image.fromarray(read_image(path, box).permute(1, 2, 0).numpy())
    image.thumbnail((SIDE, SIDE))
    file = BytesIO()
    image.save(file, "JPEG", quality=QUALITY)
    return file.getvalue()
