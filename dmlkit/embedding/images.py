"""What to embed: a folder of images, or a split of a recipe's dataset."""

from pathlib import Path

import torch
from torch import Tensor

from dmlkit.datasets.base import Split
from dmlkit.datasets.files.dataset import Dataset
from dmlkit.datasets.files.image import read_image
from dmlkit.datasets.files.paths import raise_faults, readable_name, unreadable_name
from dmlkit.errors import UserError
from dmlkit.loading.cache import images_of_split
from dmlkit.recipe.schema import Recipe


class ImageList(Dataset):
    """Unlabelled image files.

    Args:
        paths: the files.
    """

    def __init__(self, paths: list[str]) -> None:
        super().__init__(torch.zeros(len(paths), dtype=torch.int64), ("",), paths)

    def image(self, index: int) -> Tensor:
        return read_image(self.paths[index])


def dataset_of(images: Path | None, split: Split, recipe: Recipe) -> tuple[Dataset, bool]:
    """What to embed, and whether its labels mean anything: a folder of images, or a split of the recipe's dataset.

    Raises:
        UserError: the folder is missing, cannot be read or holds no image.
    """
    if images is None:
        return images_of_split(recipe.dataset, split), True
    from dmlkit.datasets.folder import image_files

    if not images.is_dir():
        raise UserError(f"{images}: no such folder; expected a folder with images")
    paths = image_files(images)
    raise_faults(unreadable_name(path) for path in paths if not readable_name(path))
    if not paths:
        raise UserError(f"{images}: no images found in this folder or below it")
    return ImageList(paths), False
