"""Listings of shards: images, labels and splits from the index, before any image is opened."""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from dmlkit.datasets.files.image import decode_image, decoding
from dmlkit.datasets.files.listing import ListedImages, Listing
from dmlkit.datasets.files.shards.indexing import indexed
from dmlkit.datasets.files.shards.manifest import MANIFEST, ShardManifest
from dmlkit.datasets.files.table_columns import arrow_compute
from dmlkit.datasets.files.table_file import known_columns
from dmlkit.datasets.files.table_rows import TableRows
from dmlkit.datasets.files.tar.index_file import BOX, TEXTS
from dmlkit.datasets.files.tar.reading import Place, Stamp, read_place


@dataclass(frozen=True)
class ShardListing(Listing):
    """Listing of the images in shards.

    Args:
        shards: paths of the tar files.
        stamps: stamp of each tar file when it was indexed.
        places: (N, 3) int64: position in ``shards``, first byte and number of bytes.
    """

    shards: Sequence[str] = field(kw_only=True)
    stamps: Sequence[Stamp] = field(kw_only=True)
    places: np.ndarray = field(kw_only=True)

    def pick(self, rows: np.ndarray) -> "ShardImages":
        return ShardImages(self, rows)


class ShardImages(ListedImages):
    """Dataset of images in shards, each read at its place without extraction.

    Args:
        listing: listing with names, labels and places.
        rows: (n,) int64, rows of the listing.
    """

    def __init__(self, listing: ShardListing, rows: np.ndarray) -> None:
        super().__init__(listing, rows)
        self.shards, self.stamps = listing.shards, listing.stamps
        self.places = listing.places[rows]

    def sample(self, index: int) -> Tensor:
        path = self.paths[index]
        shard, offset, size = map(int, self.places[index])
        with decoding(path):
            content = read_place(self.shards[shard], Place(offset, size), self.stamps[shard])
            return decode_image(path, content, self.box(index))


class ShardRows(TableRows):
    """Conversion of an index's images to a `Listing`.

    Args:
        table: pyarrow table with the columns of `known_columns`.
        root: folder of the dataset.
        classes: names of all classes in the order of their labels; None sorts the names.
    """

    def __init__(self, table: Any, root: Path, classes: Sequence[str] | None) -> None:
        super().__init__(table, root, root, key="dataset.root")
        self.classes = classes

    def _where(self, row: int) -> str:
        return f"{self.root / self.table['path'][row].as_py()}"

    def _order(self, names: list[str]) -> list[int]:
        if self.classes is None:
            return super()._order(names)
        position = {name: place for place, name in enumerate(self.classes)}
        self.faults += [
            f"{self.root}: class {name!r} is not in {self.root / MANIFEST}; remove that file if the shards are correct"
            for name in names
            if name not in position
        ]
        return sorted(range(len(names)), key=lambda index: position.get(names[index], len(position)))


def list_shards(root: Path, shards: Sequence[str], index: Path, *, has_splits: bool) -> ShardListing:
    """Return the listing of the images in shards, with all problems.

    Args:
        root: folder of the dataset.
        shards: tar files, relative to the root.
        index: index file with the places of the images.
        has_splits: whether the first folder in a shard's name is its split.

    Raises:
        UserError: see `indexed`.
    """
    compute = arrow_compute()
    manifest = ShardManifest.read(root / MANIFEST) if (root / MANIFEST).exists() else None
    stamps, rows = indexed(root, shards, index)
    at_fault = rows.filter(compute.is_valid(rows["fault"]))
    images = rows.filter(compute.is_null(rows["fault"]))
    faults = [
        f"{root / row['shard']}{'/' + row['name'] if row['name'] else ''}: {row['fault']}"
        for row in at_fault.select(["shard", "name", "fault"]).to_pylist()
    ]
    if manifest is not None:
        faults += _lost(root, manifest, images["shard"].to_pylist(), shards)
    columns = {name: images[name] for name in (*TEXTS, *BOX) if images[name].null_count < len(images)}
    columns["label"] = images["label"]
    columns["path"] = compute.binary_join_element_wise(images["shard"], images["name"], "/")
    if has_splits:
        columns["split"] = compute.list_element(compute.split_pattern(images["shard"], "/", max_splits=1), 0)
    import pyarrow as pa

    table = known_columns(pa.table(columns), f"dataset.root: {root}")
    collected = ShardRows(table, root, manifest and manifest.classes)
    listing = collected.listing()
    listing.faults[:0] = faults
    position = {shard: place for place, shard in enumerate(shards)}
    numbers = np.array([position[shard] for shard in images["shard"].to_pylist()], dtype=np.int64)
    places = np.stack([numbers, *(images[name].to_numpy() for name in ("offset", "size"))], axis=1)
    return ShardListing(
        **vars(listing),
        shards=[f"{root}{os.sep}{shard}" for shard in shards],
        stamps=[stamps[shard] for shard in shards],
        places=places[collected.keep],
    )


def _lost(root: Path, manifest: ShardManifest, of_images: Sequence[str], shards: Sequence[str]) -> list[str]:
    """Return error lines for shards that differ from those in the manifest."""
    counts = Counter(of_images)
    path = root / MANIFEST
    gone = [shard for shard in manifest.shards if shard not in shards]
    others = [shard for shard in shards if shard not in manifest.shards]
    fewer = [shard for shard, count in manifest.shards.items() if shard in shards and counts[shard] != count]
    return [
        *(f"{root / shard}: no such file, but {path} lists it; run dmlkit data shards again" for shard in gone),
        *(f"{root / shard}: this shard is not listed in {path}; remove one of the two files" for shard in others),
        *(
            f"{root / shard} has {counts[shard]} valid images, expected {manifest.shards[shard]} according to {path}; "
            "remove this shard and run dmlkit data shards again"
            for shard in fewer
        ),
    ]
