"""Writer of a cache of decoded and resized images, for machines where decoding is the bottleneck."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from dmlkit.datasets.files.dataset import Dataset
from dmlkit.datasets.files.samples import samples_named
from dmlkit.errors import UserError
from dmlkit.files.atomic import atomic_write
from dmlkit.files.document import MAX_BYTES
from dmlkit.files.image_file import BadImageError
from dmlkit.files.lock import sole_writer
from dmlkit.files.outputs import check_place, writing
from dmlkit.files.regular import read_start
from dmlkit.loading.batches import default_workers, start_reader
from dmlkit.loading.cache import COLUMNS, INDEX, MANIFEST, PIXELS, CacheManifest, read_index, sha256, stamp
from dmlkit.loading.inputs import check_resized, refuse_faults
from dmlkit.recipe.schema import Recipe
from dmlkit.transforms.base import Resizing


class ResizedImages(torch.utils.data.Dataset[tuple[Tensor | None, str]]):
    """Resized images of a dataset as (H, W, 3) uint8; None and an error message for unreadable images."""

    def __init__(self, dataset: Dataset, resizing: Resizing) -> None:
        self.dataset, self.resizing, self.resize = dataset, resizing, resizing.transform()

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Tensor | None, str]:
        try:
            image = self.dataset.sample(index)
            check_resized(image, self.resizing, self.dataset.paths[index])
            return self.resize(image).permute(1, 2, 0).contiguous(), ""
        except BadImageError as error:
            return None, str(error)


def images_to_cache(recipe: Recipe) -> Dataset:
    """Return all images of a recipe's dataset, read from their files.

    Raises:
        UserError: the dataset renders its images in memory, has vectors, or takes no cache.
    """
    if not samples_named(recipe.dataset.sample).has_pixels:
        raise UserError(f"dataset {recipe.dataset.name} has {recipe.dataset.sample}s; only images can be cached")
    for requirement in recipe.dataset.requirements():
        if requirement.key == "dataset.cache":
            raise UserError(f"dataset {recipe.dataset.name}: takes no cache, because {requirement.reason}")
    dataset = recipe.dataset.model_copy(update={"cache": None}).build("all")
    if dataset.in_memory:
        raise UserError(f"dataset {recipe.dataset.name}: the images are already in memory; no cache is needed")
    return dataset


def write_cache(
    recipe: Recipe, dataset: Dataset, output: Path, *, overwrite: bool, advance: Callable[[int], None]
) -> CacheManifest:
    """Write ``pixels.bin``, ``index.parquet`` and ``manifest.json``.

    Args:
        recipe: recipe with the resizing (the first step of its transform's evaluation) and ``on_bad_image``.
        dataset: dataset of `images_to_cache`.
        output: folder of the cache.
        overwrite: whether to replace a cache in it, which stays complete until the new one is.
        advance: called with the number of images done.

    Returns:
        The manifest.

    Raises:
        UserError: the folder contains a cache or foreign files, or an image cannot be read.
    """
    check_place(output, [recipe.dataset.data_root])
    check_output(output, overwrite=overwrite)
    with sole_writer(output, what="dmlkit data cache"):
        check_output(output, overwrite=overwrite)  # again: another process may have written one meanwhile
        return _write_cache(recipe, dataset, output, advance)


def _write_cache(recipe: Recipe, dataset: Dataset, output: Path, advance: Callable[[int], None]) -> CacheManifest:
    assert recipe.transform  # every recipe for images has a transform
    resizing = recipe.transform.resizing
    images = ResizedImages(dataset, resizing)
    loader: Any = DataLoader(images, batch_size=None, num_workers=default_workers(), worker_init_fn=start_reader)
    rows: list[CachedRow] = []
    faults: list[str] = []
    # renamed at the end in the order manifest, index, pixels, so that after a kill a manifest identifies the files
    with (
        atomic_write(output / PIXELS) as pixels_path,
        atomic_write(output / INDEX) as index_path,
        atomic_write(output / MANIFEST) as manifest_path,
    ):
        with writing(output / PIXELS), pixels_path.open("wb") as file:
            for pixels, fault in loader:
                if fault:
                    refuse_faults([fault], recipe.dataset.on_bad_image)
                    faults.append(fault)
                    rows.append(CachedRow(0, 0, 0))
                else:
                    content = pixels.numpy()
                    file.write(content.data)
                    rows.append(CachedRow(content.shape[0], content.shape[1], crc32(content.data)))
                advance(1)
        write_index(index_path, dataset, rows)
        manifest = CacheManifest(
            resizing=resizing.text,
            dataset=recipe.dataset.model_dump(mode="json"),
            images=len(rows),
            index=sha256(index_path),
            bytes=sum(3 * row.height * row.width for row in rows),
            skipped=tuple(faults),
        )
        manifest_path.write_text(manifest.text(), encoding="utf-8")
    return manifest


def check_output(output: Path, *, overwrite: bool) -> None:
    """Check that a cache may be written to a folder, without replacing foreign files or, by default, a complete cache.

    Raises:
        UserError: the folder contains a cache, or other files with its names.
    """
    found = [output / name for name in (MANIFEST, INDEX, PIXELS) if os.path.lexists(output / name)]
    if not found:
        return
    if not is_cache_manifest(output / MANIFEST):
        raise UserError(f"{found[0]} is not part of a cache that dmlkit wrote; use another --output or remove the file")
    if not overwrite and is_whole(output):
        raise UserError(f"{output}: this folder already holds a cache; use --overwrite or another --output")


def is_cache_manifest(path: Path) -> bool:
    """Return whether a file is the manifest of a cache, of any version of dmlkit."""
    try:
        data = json.loads(read_start(path, MAX_BYTES))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(data, dict) and {"resizing", "dataset", "images", "bytes", "skipped"} <= data.keys()


def is_whole(folder: Path) -> bool:
    """Return whether a folder with a cache's manifest has a complete cache, not one interrupted while renaming."""
    try:
        CacheManifest.read(folder / MANIFEST)
    except UserError:
        return True  # of another version of dmlkit, which can read it
    try:
        read_index(folder)
    except UserError:
        return False
    return True


class CachedRow(NamedTuple):
    """Image of a cache; its size is 0 x 0 if it could not be read."""

    height: int
    width: int
    checksum: int


def write_index(path: Path, dataset: Dataset, rows: list[CachedRow]) -> None:
    """Write the index: key, size and checksum of each image, and size and modification time of its file."""
    import pyarrow as pa
    from pyarrow import parquet

    stamps = [stamp(path) for path in dataset.paths]
    columns = {
        "key": [dataset.key(index) for index in range(len(dataset))],
        "height": [row.height for row in rows],
        "width": [row.width for row in rows],
        "bytes": [size for size, _ in stamps],
        "modified": [modified for _, modified in stamps],
        "crc32": [row.checksum for row in rows],
    }
    parquet.write_table(pa.table(columns, schema=pa.schema(list(COLUMNS.items()))), path)
