"""Limit on the size of a resized image; decoding has a separate limit."""

from torch import Tensor

from dmlkit.datasets.files.dataset import BadImageError
from dmlkit.datasets.files.image import MAX_PIXELS
from dmlkit.transforms.base import Resizing


def check_resized(image: Tensor, resizing: Resizing, path: str) -> None:
    """Check that an image (3, H, W) does not exceed the limit of decoding after resizing.

    Resized to a shorter side of 256 pixels, an image of 60 000 x 2, a PNG of 196 bytes, would take 6 GB.

    Raises:
        BadImageError: the resized image would be too large.
    """
    height, width = image.shape[1:]
    rows, columns = resizing.size_of(height, width)
    if rows * columns > MAX_PIXELS:
        raise BadImageError(
            f"{path}: the image of {width} x {height} pixels would have {columns} x {rows} when resized to "
            f"{resizing.text}; expected at most {MAX_PIXELS:,} pixels"
        )
