"""Images decoded and resized beforehand: plain pixels in one file that is mapped into memory."""

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dmlkit.datasets.base import DatasetConfig, Split
from dmlkit.datasets.files.dataset import BadImageError, Dataset
from dmlkit.datasets.files.paths import raise_faults
from dmlkit.errors import UserError

PIXELS, INDEX, MANIFEST = "pixels.bin", "index.parquet", "manifest.json"
FORMAT = 1
AGAIN = "run dmlkit data cache again"


def images_of_split(config: DatasetConfig, split: Split) -> Dataset:
    """The images of a split, decoded from their files or taken from the cache that the recipe names.

    Raises:
        UserError: see `DatasetConfig.build` and `CachedImages`.
    """
    dataset = config.build(split)
    return dataset if config.cache is None else CachedImages(dataset, config.cache)


class CachedImages(Dataset):
    """A dataset whose images come from a cache that ``dmlkit data cache`` wrote.

    Args:
        dataset: labels and paths; its images are not opened.
        folder: the cache.

    Raises:
        UserError: the cache is missing or damaged, lacks an image, or a file was changed since.
    """

    def __init__(self, dataset: Dataset, folder: str) -> None:
        super().__init__(
            dataset.labels,
            dataset.class_names,
            dataset.paths,
            query=dataset.query,
            gallery=dataset.gallery,
            super_classes=dataset.super_classes,
        )
        self.cache = Cache(Path(folder))
        self.resizing = self.cache.resizing
        self.rows = self.cache.rows_of(dataset)

    def image(self, index: int) -> Tensor:
        pixels = self.cache.pixels(int(self.rows[index]))
        if pixels is None:
            raise BadImageError(f"{self.paths[index]}: could not be read when the cache was written")
        return pixels


class Cache:
    """The files of a cache.

    Args:
        folder: holds ``pixels.bin index.parquet manifest.json``.
    """

    def __init__(self, folder: Path) -> None:
        from pyarrow import parquet

        try:
            manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
            index: Any = parquet.read_table(folder / INDEX)
        except FileNotFoundError as error:
            raise UserError(f"dataset.cache: {error.filename}: missing; write it with dmlkit data cache") from None
        except (OSError, ValueError) as error:  # of JSON and Parquet
            raise UserError(f"dataset.cache: {folder}: cannot read this cache: {error}; {AGAIN}") from error
        if manifest.get("format") != FORMAT:
            raise UserError(f"dataset.cache: {folder}: has format {manifest.get('format')}, expected {FORMAT}; {AGAIN}")
        self.folder, self.resizing = folder, str(manifest["resizing"])
        self.keys: list[str] = index["key"].to_pylist()
        self.stamps = np.stack([index[name].to_numpy() for name in ("bytes", "modified")], axis=1)
        self.sides = np.stack([index[name].to_numpy() for name in ("height", "width")], axis=1)
        self.ends = (3 * self.sides[:, 0] * self.sides[:, 1]).cumsum()
        size = (folder / PIXELS).stat().st_size if (folder / PIXELS).exists() else -1
        if size != (self.ends[-1] if len(self.ends) else 0):
            raise UserError(f"dataset.cache: {folder / PIXELS}: has {size} bytes, expected {self.ends[-1]}; {AGAIN}")
        self.memory: np.ndarray | None = None  # opened by each worker for itself

    def rows_of(self, dataset: Dataset) -> np.ndarray:
        """(N,) int64, where the images of a dataset lie.

        Raises:
            UserError: an image is not in the cache, or its file has another size or time than when it was written.
        """
        known = {key: row for row, key in enumerate(self.keys)}
        rows = [known.get(dataset.key(index), -1) for index in range(len(dataset))]
        raise_faults(self._faults(dataset.paths, rows))
        return np.array(rows, dtype=np.int64)

    def _faults(self, paths: Sequence[str], rows: list[int]) -> Iterator[str]:
        for path, row in zip(paths, rows, strict=True):
            if row < 0:
                yield f"dataset.cache: {self.folder} has no image {path}; {AGAIN}"
            elif stamp(path) != tuple(self.stamps[row]):
                yield f"dataset.cache: {path} has changed since {self.folder} was written; {AGAIN}"

    def pixels(self, row: int) -> Tensor | None:
        """Image ``row`` as (3, H, W) uint8; None if it could not be read."""
        height, width = self.sides[row].tolist()
        if height == 0:
            return None
        if self.memory is None:
            self.memory = np.memmap(self.folder / PIXELS, dtype=np.uint8, mode="r")
        end = int(self.ends[row])
        # the map is read-only, which torch does not know: a copy keeps transforms from writing into it
        flat = np.array(self.memory[end - 3 * height * width : end])
        return torch.from_numpy(flat).view(height, width, 3).permute(2, 0, 1)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "memory": None}


def stamp(path: str) -> tuple[int, int]:
    """Size in bytes and time of change in nanoseconds, which tell whether a file is still the same."""
    try:
        status = os.stat(path)  # noqa: PTH116 - Path costs twice the time, for each of a million files
    except OSError:
        return -1, -1
    return status.st_size, status.st_mtime_ns
