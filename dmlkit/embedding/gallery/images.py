"""Images for a gallery: their files, labels and ids by content."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dmlkit.datasets.files.dataset import Dataset
from dmlkit.datasets.files.image import Box, decoding, read_image
from dmlkit.datasets.files.listing import ListedImages
from dmlkit.datasets.files.paths import raise_faults, readable_name, unreadable_name
from dmlkit.datasets.files.tar import file_content
from dmlkit.errors import UserError
from dmlkit.files.source import require_addable

UNKNOWN = "unknown"
"""Answer for an image that has none of the labels of a gallery."""
TABLES = (".csv", ".parquet")
ID_LENGTH = 32  # hexadecimal digits, 128 bits: no two of 10^15 images share one by chance


@dataclass(frozen=True)
class LabelledImage:
    """Image file, or a box of it, for a gallery."""

    path: str
    label: str | None
    box: Box | None = None

    def id(self) -> str:
        """Return a hash of the contents of the file, and of the box.

        Raises:
            BadImageError: the file cannot be read.
        """
        with decoding(self.path):
            digest = hashlib.sha256(file_content(self.path))
        if self.box is not None:
            digest.update(repr(tuple(map(float, self.box))).encode())
        return digest.hexdigest()[:ID_LENGTH]


class LabelledImages(Dataset):
    """Dataset of some of the images."""

    def __init__(self, images: Sequence[LabelledImage]) -> None:
        super().__init__(torch.zeros(len(images), dtype=torch.int64), ("",), [image.path for image in images])
        self.images = images

    def sample(self, index: int) -> Tensor:
        return read_image(self.images[index].path, self.images[index].box)


def images_of(source: Path, label: str | None) -> list[LabelledImage]:
    """Return the images of a file, a folder or a table.

    Args:
        source: image; folder, whose subfolders are labels; or table with the columns ``path`` and ``label``.
        label: label of all images instead.

    Raises:
        UserError: there are none, or a label is empty, not UTF-8 or `UNKNOWN`.
    """
    if source.suffix.lower() in TABLES:
        found = _of_table(source)
    elif source.is_dir():
        found = _of_folder(source)
    else:
        require_addable(source)
        found = [LabelledImage(str(source.absolute()), None)]
    if label is not None:
        found = [LabelledImage(image.path, label, image.box) for image in found]
    raise_faults(unreadable_name(image.path) for image in found if not readable_name(image.path))
    for image in found:
        if image.label is not None and (
            not image.label.strip() or image.label == UNKNOWN or not readable_name(image.label)
        ):
            raise UserError(
                f"{image.path}: the label {image.label!r} names no class ({UNKNOWN!r} is what dmlkit identify says of "
                "an image of none); choose another label"
            )
    return found


def _of_folder(source: Path) -> list[LabelledImage]:
    from dmlkit.datasets.folder import image_files, is_split
    from dmlkit.datasets.shards import holds_shards

    if holds_shards(source):
        raise UserError(
            f"{source}: holds shards; a gallery takes image files, or a table whose paths are SHARD.tar/KEY.jpg"
        )
    paths = image_files(source.absolute())
    if not paths:
        raise UserError(f"{source}: no images found in this folder or below it")
    place = len(source.absolute().parts) + is_split(source)  # of the class in a path
    return [LabelledImage(path, parts[place] if len(parts := Path(path).parts) > place + 1 else None) for path in paths]


def _of_table(source: Path) -> list[LabelledImage]:
    from dmlkit.datasets.table import TableConfig

    listing = TableConfig(file=str(source.absolute())).listing()
    raise_faults(listing.faults)
    images = ListedImages(listing, np.arange(len(listing.labels)))
    return [
        LabelledImage(images.paths[row], images.class_names[int(images.labels[row])], images.box(row))
        for row in range(len(images))
    ]
