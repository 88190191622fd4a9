"""Images in tar files, the layout of WebDataset: for millions of them, where opening each file takes too long.

The package webdataset (1.0) gives samples in the order in which they lie, and samplers here ask for image i: a
class-balanced batch takes images from anywhere. So the headers are gone through once, by the standard library's
tarfile, and the place of each image is kept in an index; reading one is then a single ``os.pread``.
"""

import os
from pathlib import Path
from typing import Literal

from pydantic import Field

from dmlkit.datasets.base import DatasetConfig
from dmlkit.datasets.files.listing import LISTED_SPLITS, Listing
from dmlkit.datasets.files.tar.index_file import INDEX
from dmlkit.datasets.files.tar.member import SUFFIX
from dmlkit.datasets.folder import class_folders, is_split
from dmlkit.errors import UserError

COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")


class ShardsConfig(DatasetConfig, frozen=True):
    """Images in tar files, as WebDataset has them: ROOT/train/*.tar and ROOT/test/*.tar, or ROOT/*.tar.

    Beside KEY.jpg lies KEY.cls, a class as text, or KEY.json with the key ``label`` and, if wanted, those of a
    table's columns. Without ``train`` and ``test`` folders the first half of the sorted labels trains, the rest tests.
    Beside them a folder ``validation`` may hold the validation classes. ``dmlkit data shards`` writes such a folder.
    """

    name: Literal["shards"] = "shards"
    root: str = Field(min_length=1)
    """The folder, relative to where dmlkit is started."""
    index: str | None = Field(default=None, min_length=1)
    """The file that keeps where images lie, written at the first use; null is ROOT/shards.parquet."""

    def listing(self) -> Listing:
        from dmlkit.datasets.files.shards.listing import list_shards

        root = Path(self.root)
        if not root.is_dir():
            raise UserError(
                f"dataset.root: {root}: no such folder; expected one with tar files; if it has moved, "
                "--set dataset.root=PATH"
            )
        if not hasattr(os, "pread"):
            raise UserError("dataset.name: shards need a system that reads at a place (pread), which Windows does not")
        has_splits = is_split(root)
        index = root / INDEX if self.index is None else Path(self.index)
        return list_shards(root, shards_below(root), index, has_splits=has_splits)


def shards_below(root: Path) -> list[str]:
    """The tar files of a folder, or of its folders ``train``, ``validation`` and ``test``, relative to it and sorted.

    Raises:
        UserError: there are none, or compressed ones, or one of ``train`` and ``test`` is missing.
    """
    folders = [root / split for split in LISTED_SPLITS if (root / split).is_dir()] if is_split(root) else [root]
    found: list[str] = []
    for folder in folders:
        files = sorted(path for path in folder.iterdir() if not path.name.startswith(".") and not path.is_dir())
        for path in files:
            if path.name.lower().endswith(COMPRESSED):
                raise UserError(f"{path}: a compressed tar file has no places to read at; decompress it: gunzip, unxz")
        own = [path.relative_to(root).as_posix() for path in files if path.suffix == SUFFIX]
        if not own:
            raise UserError(f"dataset.root: {folder}: no tar files here; expected *{SUFFIX}, also in train/ and test/")
        found += own
    for missing, beside in (("test", "train"), ("train", "test")):
        if root / missing not in folders and root / beside in folders:
            raise UserError(f"dataset.root: {root} has no folder {missing!r} beside {beside!r}; add it")
    return found


def holds_shards(root: Path) -> bool:
    """Whether a folder is one of shards: it, or its ``train`` or ``test``, has tar files and no class folders."""
    places = [place for place in (root, root / "train", root / "test") if place.is_dir()]
    return any(next(place.glob(f"*{SUFFIX}"), None) and not class_folders(place) for place in places)
