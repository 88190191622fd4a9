"""Write a cache of decoded and resized images, for machines where decoding is the limit."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from dmlkit.datasets.files.dataset import BadImageError, Dataset
from dmlkit.errors import UserError
from dmlkit.files.atomic import atomic_write
from dmlkit.loading.cache import INDEX, MANIFEST, PIXELS, CacheManifest, stamp
from dmlkit.loading.faults import refuse_faults
from dmlkit.loading.sizes import check_resized
from dmlkit.recipe.schema import Recipe
from dmlkit.transforms.base import Resizing


class ResizedImages(torch.utils.data.Dataset[tuple[Tensor | None, str]]):
    """Images of a dataset, resized, as (H, W, 3) uint8; None and a fault for those that cannot be read.

    Args:
        dataset: the images.
        resizing: what to do with each.
    """

    def __init__(self, dataset: Dataset, resizing: Resizing) -> None:
        self.dataset, self.resizing, self.resize = dataset, resizing, resizing.transform()

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Tensor | None, str]:
        try:
            image = self.dataset.image(index)
            check_resized(image, self.resizing, self.dataset.paths[index])
            return self.resize(image).permute(1, 2, 0).contiguous(), ""
        except BadImageError as error:
            return None, str(error)


def first(items: list[Any]) -> Any:
    """The one item of a batch."""
    return items[0]


def images_to_cache(recipe: Recipe) -> Dataset:
    """All images of a recipe's dataset, from their files.

    Raises:
        UserError: they are rendered in memory.
    """
    dataset = recipe.dataset.model_copy(update={"cache": None}).build("all")
    if dataset.in_memory:
        raise UserError(f"dataset {recipe.dataset.name}: its images are in memory already; a cache gains nothing")
    return dataset


def write_cache(
    recipe: Recipe, dataset: Dataset, output: Path, *, overwrite: bool, advance: Callable[[int], None]
) -> CacheManifest:
    """Write ``pixels.bin``, ``index.parquet`` and ``manifest.json``.

    Args:
        recipe: says how to resize (the first step of its transform's evaluation) and what to do with bad images.
        dataset: of `images_to_cache`.
        output: a folder.
        overwrite: replace the cache in it.
        advance: told of the images done.

    Returns:
        The manifest.

    Raises:
        UserError: the folder holds a cache, or an image cannot be read.
    """
    if (output / MANIFEST).exists() and not overwrite:
        raise UserError(f"{output}: this folder already holds a cache; give --overwrite or another --output")
    output.mkdir(parents=True, exist_ok=True)
    (output / MANIFEST).unlink(missing_ok=True)  # until the new one is whole
    resizing = recipe.transform.resizing
    images = ResizedImages(dataset, resizing)
    loader: Any = DataLoader(images, batch_size=1, collate_fn=first, num_workers=min(8, os.cpu_count() or 1))
    sides: list[tuple[int, int]] = []
    faults: list[str] = []
    with atomic_write(output / PIXELS) as partial, partial.open("wb") as file:
        for pixels, fault in loader:
            if fault:
                refuse_faults([fault], recipe.dataset.on_bad_image)
                faults.append(fault)
                sides.append((0, 0))
            else:
                file.write(pixels.numpy().data)
                sides.append((pixels.shape[0], pixels.shape[1]))
            advance(1)
    write_index(output / INDEX, dataset, sides)
    manifest = CacheManifest(
        resizing=resizing.text,
        dataset=recipe.dataset.model_dump(mode="json"),
        images=len(sides),
        bytes=sum(3 * height * width for height, width in sides),
        skipped=tuple(faults),
    )
    manifest.write(output / MANIFEST)
    return manifest


def write_index(path: Path, dataset: Dataset, sides: list[tuple[int, int]]) -> None:
    """Which image lies where, and what its file was like."""
    import pyarrow as pa
    from pyarrow import parquet

    stamps = [stamp(path) for path in dataset.paths]
    columns = {
        "key": pa.array([dataset.key(index) for index in range(len(dataset))], pa.string()),
        "height": pa.array([height for height, _ in sides], pa.int64()),
        "width": pa.array([width for _, width in sides], pa.int64()),
        "bytes": pa.array([size for size, _ in stamps], pa.int64()),
        "modified": pa.array([modified for _, modified in stamps], pa.int64()),
    }
    with atomic_write(path) as partial:
        parquet.write_table(pa.table(columns), partial)
