"""Dataset of images in tar files with WebDataset's layout, for millions of images, where opening files takes too long.

The package webdataset (1.0) returns samples in the order of the tar file, but a class-balanced batch needs images from
anywhere. So the headers are scanned once with the standard library's tarfile, and the place of each image is kept in an
index; reading an image is then a single ``os.pread``.
"""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field
from torch import Tensor

from dmlkit.datasets.base import DatasetConfig
from dmlkit.datasets.files.image import decode_image
from dmlkit.datasets.files.listing import ListedImages, Listing
from dmlkit.datasets.files.shard_scan import scan_shard
from dmlkit.datasets.files.table_file import arrow_compute, known_columns
from dmlkit.datasets.files.tar import (
    BOX,
    INDEX,
    SUFFIX,
    TEXTS,
    Place,
    Stamp,
    arrow_table,
    read_index,
    read_place,
    stamp_of,
    write_index,
)
from dmlkit.datasets.folder import class_folders, is_split, splits_below
from dmlkit.datasets.table import TableRows
from dmlkit.errors import OptionError, UserError, option_errors, warn, warn_after
from dmlkit.files.document import Document
from dmlkit.files.image_file import decoding
from dmlkit.files.lock import sole_writer
from dmlkit.files.source import MOVED

COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")


class ShardsConfig(DatasetConfig, frozen=True):
    """Images in tar files with WebDataset's layout: ROOT/train/*.tar and ROOT/test/*.tar, or ROOT/*.tar.

    Each KEY.jpg needs KEY.cls with the class as text, or KEY.json with the key ``label`` and optionally the keys of a
    table's columns. Without ``train`` and ``test`` folders, the first half of the sorted labels is for training, the
    rest for testing. A folder ``validation`` next to them may contain the validation classes. ``dmlkit data shards``
    writes such a folder.
    """

    titled_by: ClassVar = "root"
    name: Literal["shards"] = "shards"
    root: str = Field(min_length=1)
    """Folder of the tar files, relative to the working directory."""
    index: str | None = Field(default=None, min_length=1)
    """Index file with the places of the images, written at the first use; null is ROOT/shards.parquet."""

    def listing(self) -> Listing:
        root = Path(self.root)
        if not root.is_dir():
            raise OptionError(
                "dataset.root",
                f"{root}: no such folder; expected one with tar files; {MOVED}root=PATH",
            )
        if not hasattr(os, "pread"):
            raise OptionError(
                "dataset.name",
                "shards needs an operating system with os.pread, which Windows lacks; use another dataset",
            )
        return list_shards(root, root / INDEX if self.index is None else Path(self.index))


def shards_below(root: Path) -> list[str]:
    """Return the tar files of a folder, or of its folders ``train``, ``validation`` and ``test``, relative and sorted.

    Raises:
        UserError: there are no tar files or compressed ones, or ``train`` or ``test`` is missing.
    """
    folders = [root / split for split in splits_below(root)] if is_split(root) else [root]
    found: list[str] = []
    for folder in folders:
        files = sorted(path for path in folder.iterdir() if not path.name.startswith(".") and not path.is_dir())
        for path in files:
            if path.name.lower().endswith(COMPRESSED):
                raise UserError(
                    f"{path}: images cannot be read from a compressed tar file; decompress it, e.g. with gunzip or unxz"
                )
        own = [path.relative_to(root).as_posix() for path in files if path.suffix == SUFFIX]
        if not own:
            raise OptionError(
                "dataset.root",
                f"{folder}: no tar files in this folder; expected *{SUFFIX}, directly or in train/ and test/",
            )
        found += own
    return found


def holds_shards(root: Path) -> bool:
    """Return whether a folder, or its ``train`` or ``test``, has tar files and no class folders."""
    places = [place for place in (root, root / "train", root / "test") if place.is_dir()]
    return any(next(place.glob(f"*{SUFFIX}"), None) and not class_folders(place) for place in places)


Stamps = dict[str, Stamp]
MOST_NAMED = 5  # shards in a message
WARN_AFTER = 5.0  # seconds


def indexed(root: Path, shards: Sequence[str], file: Path) -> tuple[Stamps, Any]:
    """Return the stamps of shards and a pyarrow table of their images.

    The index is read from its file, which is first written if it is missing or out of date. If several ranks start
    together, one reads the shards and the others wait.

    Raises:
        UserError: a shard cannot be read, or the file is not an index by dmlkit or cannot be written.
    """
    stamps = {shard: stamp_of(str(root / shard)) for shard in shards}
    known, rows = _known(file)
    if known == stamps:
        return stamps, rows
    if not _is_writable(file.parent):
        warn(
            f"{file}: the folder is read-only, so the shards are indexed again at every start; set dataset.index to a "
            "file in a writable folder"
        )
        import pyarrow as pa

        return stamps, pa.concat_tables(list(_tables(root, stamps, known, rows)))
    with sole_writer(file.parent, what="an indexing of shards", patience=inf):
        known, rows = _known(file)  # again: another process may have written it meanwhile
        if known != stamps:
            _warn_of_changes(file, stamps, known)
            with warn_after(WARN_AFTER, f"{file}: indexing {len(stamps)} shards, once; this may take minutes"):
                write_index(file, stamps, _tables(root, stamps, known, rows))
            rows = read_index(file)[1]
    return stamps, rows


def _known(file: Path) -> tuple[Stamps, Any]:
    """Return the stamps and the rows of an index; both are empty if the file does not exist."""
    if not file.exists():
        return {}, arrow_table([])
    document, rows = read_index(file)
    return document.shards, rows


def _is_writable(folder: Path) -> bool:
    return os.access(next(above for above in (folder, *folder.absolute().parents) if above.exists()), os.W_OK)


def _tables(root: Path, stamps: Stamps, known: Stamps, rows: Any) -> Iterator[Any]:
    """Yield the rows of each shard, from the index if the shard has not changed."""
    from pyarrow import compute

    for shard, stamp in stamps.items():
        if known.get(shard) == stamp:
            yield rows.filter(compute.field("shard") == shard)
        else:
            yield scan_shard(root, shard)


def _warn_of_changes(file: Path, stamps: Stamps, known: Stamps) -> None:
    changed = [shard for shard, stamp in known.items() if stamps.get(shard) != stamp]
    if changed:
        more = f" and {len(changed) - MOST_NAMED} more" if len(changed) > MOST_NAMED else ""
        warn(
            f"{file}: shards changed or removed since it was written: {', '.join(changed[:MOST_NAMED])}{more}; "
            "the index is updated"
        )


MANIFEST = "shards.json"


class ShardManifest(Document, frozen=True, strict=True):
    """Contents of a folder of shards, complete or still being written."""

    kind: ClassVar[str] = "manifest of shards"

    source: str
    """SHA-256 of the names, labels, sizes and modification times of the images."""
    classes: tuple[str, ...]
    """Names of the classes in the order of their labels."""
    shards: dict[str, int]
    """Number of images per shard, by the shard's name relative to the folder."""


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
    """Dataset of images in shards, each read at its place without extraction."""

    def __init__(self, listing: ShardListing, rows: np.ndarray) -> None:
        super().__init__(listing, rows)
        self.shards, self.stamps = listing.shards, listing.stamps
        self.places = listing.places[rows]

    def sample(self, index: int) -> Tensor:
        path = self.paths[index]
        shard, offset, size = map(int, self.places[index])
        with decoding(path):
            content = read_place(self.shards[shard], Place(offset, size), self.stamps[shard])
            return decode_image(path, content, self.box(index), self.least_side)


class ShardRows(TableRows):
    """Conversion of an index's images to a `Listing`.

    Args:
        table: pyarrow table with the columns of `known_columns`.
        root: folder of the dataset.
        classes: names of all classes in the order of their labels; None sorts the names.
    """

    def __init__(self, table: Any, root: Path, classes: Sequence[str] | None) -> None:
        super().__init__(table, root, root)
        self.classes = classes

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


def list_shards(root: Path, index: Path) -> ShardListing:
    """Return the listing of the images in the shards of a folder, with all problems.

    Raises:
        UserError: see `shards_below` and `indexed`.
    """
    compute, shards = arrow_compute(), shards_below(root)
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
    if is_split(root):  # the first folder in a shard's name
        columns["split"] = compute.list_element(compute.split_pattern(images["shard"], "/", max_splits=1), 0)
    import pyarrow as pa

    with option_errors("dataset.root"):
        collected = ShardRows(known_columns(pa.table(columns), str(root)), root, manifest and manifest.classes)
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
