"""Images to embed: a folder of images, vectors, or a split of a recipe's dataset."""

from pathlib import Path

import torch
from torch import Tensor

from dmlkit.datasets.base import Split
from dmlkit.datasets.files.dataset import Dataset
from dmlkit.datasets.files.image import read_image
from dmlkit.datasets.files.paths import raise_faults, readable_name, unreadable_name
from dmlkit.datasets.files.vectors import VectorFile, VectorList
from dmlkit.errors import UserError
from dmlkit.loading.cache import images_of_split
from dmlkit.recipe.schema import Recipe


class ImageList(Dataset):
    """Unlabeled image files.

    Args:
        paths: the files.
    """

    def __init__(self, paths: list[str]) -> None:
        super().__init__(torch.zeros(len(paths), dtype=torch.int64), ("",), paths)

    def sample(self, index: int) -> Tensor:
        return read_image(self.paths[index])


def dataset_of(images: Path | None, split: Split, recipe: Recipe) -> tuple[Dataset, bool]:
    """Return the dataset to embed, a folder or a split of the recipe's dataset, and whether its labels are meaningful.

    Args:
        images: folder of image files or shards; a file of vectors if the recipe's samples are vectors.
        split: split of the recipe's dataset, used without ``images``.
        recipe: recipe with the dataset.

    Raises:
        UserError: the folder or file is missing, cannot be read or has no image.
    """
    if images is None:
        return images_of_split(recipe.dataset, split), True
    if recipe.dataset.sample == "vector":
        return _vectors(images), False
    from dmlkit.datasets.folder import image_files
    from dmlkit.datasets.shards import ShardsConfig, holds_shards

    if not images.is_dir():
        raise UserError(f"{images}: no such folder; expected a folder with images")
    if holds_shards(images):
        listing = ShardsConfig(root=str(images)).listing()
        raise_faults(listing.faults)
        return listing.everything(), True
    paths = image_files(images)
    raise_faults(unreadable_name(path) for path in paths if not readable_name(path))
    if not paths:
        raise UserError(f"{images}: no images found in this folder or below it")
    return ImageList(paths), False


def _vectors(path: Path) -> Dataset:
    if path.is_dir() and not (path / "manifest.json").exists():
        raise UserError(
            f"{path}: is a folder, but the model takes vectors; expected an .npy or .parquet file of them, or a folder "
            "that dmlkit embed wrote"
        )
    vectors = VectorFile(path)
    raise_faults(vectors.faults())
    return VectorList(vectors)
