"""A bound on what becomes of an image when it is resized; decoding has one of its own."""

from torch import Tensor

from dmlkit.datasets.files.dataset import BadImageError
from dmlkit.datasets.files.image import MAX_PIXELS
from dmlkit.transforms.base import Resizing


def check_resized(image: Tensor, resizing: Resizing, path: str) -> None:
    """Make sure that an image (3, H, W) does not become larger than the largest that is decoded.

    With a shorter side of 256 pixels, 60 000 x 2 of them, a PNG of 196 bytes, would take 6 GB.

    Raises:
        BadImageError: it does; names the image by its path.
    """
    height, width = image.shape[1:]
    rows, columns = resizing.size_of(height, width)
    if rows * columns > MAX_PIXELS:
        raise BadImageError(
            f"{path}: {width} x {height} pixels become {columns} x {rows}, resized to {resizing.text}; "
            f"expected at most {MAX_PIXELS:,}"
        )
