"""Errors for images that could not be read."""

from collections.abc import Sequence

from dmlkit.errors import UserError


def refuse_faults(faults: Sequence[str], on_bad_image: str) -> None:
    """Raise an error for the first unreadable image, unless such images are to be skipped.

    Raises:
        UserError: an image could not be read, and ``on_bad_image`` is "error".
    """
    if faults and on_bad_image == "error":
        raise UserError(f"{faults[0]}; repair or remove it, or skip such images with dataset.on_bad_image=skip")


def refuse_nothing_read(images_read: int, faults: Sequence[str], source: str) -> None:
    """Raise an error if no image could be read, even if unreadable images are to be skipped: a disk may be unmounted.

    Raises:
        UserError: no image could be read.
    """
    if faults and not images_read:
        raise UserError(f"{source}: none of {len(faults)} images could be read; the first: {faults[0]}")
