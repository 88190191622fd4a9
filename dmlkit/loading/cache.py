"""Cache of decoded and resized images, for machines where decoding is slow: pixels in one memory-mapped file."""

import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple
from zlib import crc32

import numpy as np
import torch
from pydantic import NonNegativeInt
from torch import Tensor
from torch.utils.data import DataLoader

from dmlkit.datasets.base import DatasetConfig, Split
from dmlkit.datasets.files.dataset import Dataset, ReplacedSamples
from dmlkit.datasets.files.image import Turns
from dmlkit.datasets.files.paths import raise_faults
from dmlkit.datasets.files.samples import samples_named
from dmlkit.errors import OptionError, UserError
from dmlkit.files.atomic import atomic_write
from dmlkit.files.document import MAX_BYTES, Document
from dmlkit.files.image_file import MAX_PIXELS, BadImageError
from dmlkit.files.lock import sole_writer
from dmlkit.files.outputs import check_place, writing
from dmlkit.files.regular import read_start
from dmlkit.loading.batches import WORKER_START, default_workers, start_reader
from dmlkit.loading.inputs import check_resized, refuse_faults
from dmlkit.recipe.schema import Recipe
from dmlkit.transforms.base import Resizing

PIXELS, INDEX, MANIFEST = "pixels.bin", "index.parquet", "manifest.json"
COLUMNS = {
    "key": "string",
    "height": "int64",
    "width": "int64",
    "bytes": "int64",
    "modified": "int64",
    "crc32": "int64",
}
"""Columns of the index with their Arrow types; ``crc32`` is the checksum of an image's pixels."""
AGAIN = "run dmlkit data cache again"


class CacheManifest(Document, frozen=True, strict=True):
    """``manifest.json``, the description of a cache."""

    kind: ClassVar[str] = "manifest of an image cache"

    resizing: str
    """Resizing of every image, in words; see `dmlkit.transforms.base.Resizing`."""
    dataset: dict[str, Any]
    """Name and options, as in the recipe."""
    images: NonNegativeInt
    """Number of rows of the index, including images that could not be read."""
    index: str
    """SHA-256 of the index, because after a crash during renaming the files may be of two caches."""
    bytes: NonNegativeInt
    """Size of the pixels of all images."""
    skipped: tuple[str, ...]
    """One message per image that could not be read."""


def images_of_split(config: DatasetConfig, split: Split) -> Dataset:
    """Return the images of a split, see `DatasetConfig.build`, or its `CachedImages` if the recipe has a cache."""
    dataset = config.build(split)
    return dataset if config.cache is None else CachedImages(dataset, config.cache)


class CachedImages(ReplacedSamples):
    """Dataset whose images come from a cache that ``dmlkit data cache`` wrote.

    Raises:
        UserError: the cache is missing or damaged or lacks an image, or a file has changed since.
    """

    def __init__(self, dataset: Dataset, folder: str) -> None:
        super().__init__(dataset)
        self.cache = Cache(Path(folder))
        self.resizing = self.cache.resizing
        self.rows = self.cache.rows_of(dataset)

    def sample(self, index: int) -> Tensor:
        pixels = self.cache.pixels(int(self.rows[index]))
        if pixels is None:
            raise BadImageError(f"{self.paths[index]}: this image could not be read when the cache was written")
        return pixels


class Cache:
    """Reader of a cache.

    Raises:
        UserError: a file is missing, damaged, or of another version of dmlkit.
    """

    def __init__(self, folder: Path) -> None:
        manifest, index = read_index(folder)
        self.folder, self.resizing = folder, manifest.resizing
        self.keys: list[str] = index["key"].to_pylist()
        self.stamps = np.stack([index[name].to_numpy() for name in ("bytes", "modified")], axis=1)
        self.sides = np.stack([index[name].to_numpy() for name in ("height", "width")], axis=1)
        self.ends = (3 * self.sides[:, 0] * self.sides[:, 1]).cumsum()
        self.checksums = index["crc32"].to_numpy()
        self.memory: np.ndarray | None = None  # each worker opens its own map

    def rows_of(self, dataset: Dataset) -> np.ndarray:
        """Return (N,) int64, the rows of a dataset's images in the cache.

        Raises:
            UserError: an image is not in the cache, or its file has changed in size or time since it was written.
        """
        known = {key: row for row, key in enumerate(self.keys)}
        rows = [known.get(dataset.key(index), -1) for index in range(len(dataset))]
        raise_faults(self._faults(dataset.paths, rows))
        return np.array(rows, dtype=np.int64)

    def _faults(self, paths: Sequence[str], rows: list[int]) -> Iterator[str]:
        for path, row in zip(paths, rows, strict=True):
            if row < 0:
                yield f"dataset.cache: {self.folder} does not contain the image {path}; {AGAIN}"
            elif stamp(path) != tuple(self.stamps[row]):
                yield f"dataset.cache: {path} has changed since {self.folder} was written; {AGAIN}"

    def pixels(self, row: int) -> Tensor | None:
        """Return an image as (3, H, W) uint8; None if it could not be read when the cache was written.

        Raises:
            BadImageError: the pixels do not match their checksum.
        """
        height, width = self.sides[row].tolist()
        if height == 0:
            return None
        if self.memory is None:
            self.memory = np.memmap(self.folder / PIXELS, dtype=np.uint8, mode="r")
        end = int(self.ends[row])
        # a copy, because the map is read-only, which torch does not know, and a transform may write in place
        flat = np.array(self.memory[end - 3 * height * width : end])
        if zlib.crc32(flat.data) != self.checksums[row]:  # 0.1 ms for an image of 256 x 341
            raise BadImageError(f"dataset.cache: {self.folder / PIXELS}: {self.keys[row]} is damaged; {AGAIN}")
        return torch.from_numpy(flat).view(height, width, 3).permute(2, 0, 1)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "memory": None}


def read_index(folder: Path) -> tuple[CacheManifest, Any]:
    """Read the manifest of a cache and its index, a pyarrow table; check that they fit each other and the pixels' size.

    Raises:
        UserError: a file is missing, damaged, of another cache, or of another version of dmlkit.
    """
    from pyarrow import ArrowException, parquet

    path = folder / INDEX
    for name in (MANIFEST, INDEX, PIXELS):
        if not (folder / name).is_file():
            raise OptionError(
                "dataset.cache", f"{folder / name}: no such file; create the cache with dmlkit data cache"
            )
    try:
        manifest = CacheManifest.read(folder / MANIFEST)
        if sha256(path) != manifest.index:
            raise UserError(f"{path} is damaged, or belongs to another cache than {folder / MANIFEST}")
        index: Any = parquet.read_table(path)
        _check_index(index, manifest, path)
    except UserError as error:
        raise OptionError("dataset.cache", f"{error}; {AGAIN}") from error
    except (OSError, ArrowException) as error:
        raise OptionError("dataset.cache", f"{path}: cannot read this index: {error}; {AGAIN}") from error
    size = (folder / PIXELS).stat().st_size
    if size != manifest.bytes:
        raise OptionError("dataset.cache", f"{folder / PIXELS} has {size} bytes, expected {manifest.bytes}; {AGAIN}")
    return manifest, index


def _check_index(index: Any, manifest: CacheManifest, path: Path) -> None:
    columns = {name: str(index.schema.field(name).type) for name in index.column_names}
    if columns != COLUMNS or any(column.null_count for column in index.columns):
        raise UserError(f"{path} has columns {columns}, expected {COLUMNS}, without blank cells")
    sides = np.stack([index[name].to_numpy() for name in ("height", "width")])
    is_size = ((sides >= 0) & (sides <= MAX_PIXELS)).all() and (sides.prod(0) <= MAX_PIXELS).all()
    if index.num_rows != manifest.images or not is_size or 3 * sides.prod(0).sum() != manifest.bytes:
        raise UserError(
            f"{path} has {index.num_rows} images, expected {manifest.images} with {manifest.bytes} bytes in total"
        )


def sha256(path: Path) -> str:
    """Compute the SHA-256 of a file in bounded memory."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def stamp(path: str) -> tuple[int, int]:
    """Return size in bytes and modification time in nanoseconds of a file, by which a change is noticed.

    For a missing file, both are -1.
    """
    try:
        status = os.stat(path)  # noqa: PTH116 - Path takes twice the time, for each of thousands of files
    except OSError:
        return -1, -1
    return status.st_size, status.st_mtime_ns


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
    """Write ``pixels.bin``, ``index.parquet`` and ``manifest.json``, and return the manifest.

    Args:
        recipe: recipe with the resizing (the first step of its transform's evaluation) and ``on_bad_image``.
        dataset: dataset of `images_to_cache`.
        output: folder of the cache.
        overwrite: whether to replace a cache in it, which stays complete until the new one is.
        advance: called with the number of images done.

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
    loader: Any = DataLoader(
        images,
        batch_size=None,
        num_workers=default_workers(),
        worker_init_fn=partial(start_reader, Turns()),
        multiprocessing_context=WORKER_START,
    )
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
    """Raise a `UserError` if files with a cache's names are foreign or, by default, a complete cache."""
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
