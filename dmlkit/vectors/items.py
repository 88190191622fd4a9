"""What is known of the image of a point. This module imports no torch."""

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from dmlkit.files.image_file import Box


class PointItem(NamedTuple):
    """What is known of the image of one point."""

    id: int | str
    label: str | None
    path: str
    thumbnail: bytes | None = None  # a JPEG, of the box if there is one
    box: "Box | None" = None  # in the image file; None for the full image
