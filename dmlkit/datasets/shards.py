"""Dataset of images in tar files with WebDataset's layout, for millions of images, where opening files takes too long.

The package webdataset (1.0) returns samples in the order of the tar file, but a class-balanced batch needs images from
anywhere. So the headers are scanned once with the standard library's tarfile, and the place of each image is kept in an
index; reading an image is then a single ``os.pread``.
"""

import os
from pathlib import Path
from typing import Literal

from pydantic import Field

from dmlkit.datasets.base import DatasetConfig
from dmlkit.datasets.files.listing import LISTED_SPLITS, Listing
from dmlkit.datasets.files.tar import INDEX, SUFFIX
from dmlkit.datasets.folder import class_folders, is_split
from dmlkit.errors import OptionError, UserError

COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")


class ShardsConfig(DatasetConfig, frozen=True):
    """Images in tar files with WebDataset's layout: ROOT/train/*.tar and ROOT/test/*.tar, or ROOT/*.tar.

    Each KEY.jpg needs KEY.cls with the class as text, or KEY.json with the key ``label`` and optionally the keys of a
    table's columns. Without ``train`` and ``test`` folders, the first half of the sorted labels is for training, the
    rest for testing. A folder ``validation`` next to them may contain the validation classes. ``dmlkit data shards``
    writes such a folder.
    """

    name: Literal["shards"] = "shards"
    root: str = Field(min_length=1)
    """Folder of the tar files, relative to the working directory."""
    index: str | None = Field(default=None, min_length=1)
    """Index file with the places of the images, written at the first use; null is ROOT/shards.parquet."""

    def listing(self) -> Listing:
        from dmlkit.datasets.files.shard_listing import list_shards

        root = Path(self.root)
        if not root.is_dir():
            raise OptionError(
                "dataset.root",
                f"{root}: no such folder; expected one with tar files; if it has moved, use --set dataset.root=PATH",
            )
        if not hasattr(os, "pread"):
            raise OptionError(
                "dataset.name",
                "shards needs an operating system with os.pread, which Windows lacks; use another dataset",
            )
        has_splits = is_split(root)
        index = root / INDEX if self.index is None else Path(self.index)
        return list_shards(root, shards_below(root), index, has_splits=has_splits)


def shards_below(root: Path) -> list[str]:
    """Return the tar files of a folder, or of its folders ``train``, ``validation`` and ``test``, relative and sorted.

    Raises:
        UserError: there are no tar files or compressed ones, or ``train`` or ``test`` is missing.
    """
    folders = [root / split for split in LISTED_SPLITS if (root / split).is_dir()] if is_split(root) else [root]
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
    for missing, present in (("test", "train"), ("train", "test")):
        if root / missing not in folders and root / present in folders:
            raise OptionError("dataset.root", f"{root} has a folder {present!r} but no folder {missing!r}; add it")
    return found


def holds_shards(root: Path) -> bool:
    """Return whether a folder, or its ``train`` or ``test``, has tar files and no class folders."""
    places = [place for place in (root, root / "train", root / "test") if place.is_dir()]
    return any(next(place.glob(f"*{SUFFIX}"), None) and not class_folders(place) for place in places)
