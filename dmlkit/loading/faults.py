"""Images that could not be read: whether to go on without them."""

from collections.abc import Sequence

from dmlkit.errors import UserError


def refuse_faults(faults: Sequence[str], on_bad_image: str) -> None:
    """Stop at the first image that could not be read, unless such images are to be skipped.

    Raises:
        UserError: names the image.
    """
    if faults and on_bad_image == "error":
        raise UserError(f"{faults[0]}; mend or remove it, or leave such images out with dataset.on_bad_image=skip")


def refuse_nothing_read(images_read: int, faults: Sequence[str], source: str) -> None:
    """Stop where no image could be read at all, even if such images are to be skipped: a disk may not be mounted.

    Args:
        images_read: how many could be read.
        faults: one message per image that could not.
        source: what the images are, for the error.

    Raises:
        UserError: names the first image.
    """
    if faults and not images_read:
        raise UserError(f"{source}: none of {len(faults)} images could be read; the first: {faults[0]}")
