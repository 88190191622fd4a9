"""What is known of the image of a point. This module imports no torch."""

from typing import NamedTuple


class PointItem(NamedTuple):
    """What is known of the image of one point."""

    id: int | str
    label: str | None
    path: str
    thumbnail: bytes | None = None  # a JPEG
