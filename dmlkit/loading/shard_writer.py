"""Writer of a dataset as shards: its unchanged image files in tar files with WebDataset's layout."""

import hashlib
import json
import os
import tarfile
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from dmlkit.datasets.base import DatasetConfig
from dmlkit.datasets.files.listing import LISTED_SPLITS, ListedImages, Listing
from dmlkit.datasets.files.paths import DATA_CHECK, raise_faults
from dmlkit.datasets.files.samples import samples_named
from dmlkit.datasets.files.tar import BOX, file_content
from dmlkit.datasets.shards import MANIFEST, ShardManifest, ShardsConfig
from dmlkit.errors import UserError
from dmlkit.files.atomic import atomic_write, is_partial
from dmlkit.files.lock import LOCK, sole_writer
from dmlkit.files.outputs import check_place, writing
from dmlkit.files.regular import EXTENSIONS
from dmlkit.loading.cache import stamp


class ShardWriter:
    """Writer of a dataset's images to shards.

    Args:
        config: configuration of the dataset.
        images_per_shard: number of images per shard; the last shard of a split may have fewer.

    Raises:
        UserError: the dataset has no image files, or has problems.
    """

    def __init__(self, config: DatasetConfig, images_per_shard: int) -> None:
        config.require_one_label("dmlkit data shards")
        listing = config.listing()
        if listing is None or not samples_named(listing.sample).has_pixels:
            raise UserError(f"dataset {config.name} has no image files; expected a dataset of image files")
        raise_faults([*listing.faults, *listing.overlaps()], DATA_CHECK)
        self.listing, self.images_per_shard, self.data_root = listing, images_per_shard, config.data_root
        images = listing.everything()
        assert isinstance(images, ListedImages)
        if len(images) and images.file(0) is None and images.box(0) is None:
            raise UserError(f"dataset {config.name} has its images in other files; expected a dataset of image files")
        self.images = images
        self.names = member_names(listing)
        self.alone = _alone(listing.groups)

    def __len__(self) -> int:
        return len(self.images)

    def write(self, output: Path, advance: Callable[[int], None]) -> ShardManifest:
        """Write the missing shards and their index.

        Args:
            output: a folder: new, empty, or with shards of the same images from an interrupted call.
            advance: called with the number of images done.

        Raises:
            UserError: the folder has other content, or an image or shard cannot be read or written.
        """
        rows_of = dict(self._shards())
        manifest = ShardManifest(
            source=self._source(),
            classes=tuple(self.listing.class_names),
            shards={shard: len(rows) for shard, rows in rows_of.items()},
        )
        check_place(output, [self.data_root])
        _check_output(output, manifest)
        with sole_writer(output, what="dmlkit data shards"):
            _check_output(output, manifest)  # again: another process may have written meanwhile
            manifest.write(output / MANIFEST)  # first, so that after a kill the files are identified as dmlkit's
            for shard, rows in rows_of.items():
                if not (output / shard).exists():
                    (output / shard).parent.mkdir(exist_ok=True)
                    self._write_shard(output / shard, rows)
                advance(len(rows))
        ShardsConfig(root=str(output)).listing()  # writes the index
        return manifest

    def _shards(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield name and rows of each shard, in the order of the listing."""
        for split in LISTED_SPLITS:
            rows = self.listing.rows_of(split)
            for shard, start in enumerate(range(0, len(rows), self.images_per_shard)):
                yield f"{split}/{shard:06}.tar", rows[start : start + self.images_per_shard]

    def _write_shard(self, path: Path, rows: np.ndarray) -> None:
        with writing(path, tarfile.TarError), atomic_write(path) as partial, tarfile.open(partial, "w") as tar:
            for row in map(int, rows):
                key, extension = self.names[row]
                source = self.images.paths[row]
                try:
                    content = file_content(source)
                except OSError as error:
                    raise UserError(f"{source}: cannot read this image: {error.strerror or error}") from error
                _add(tar, key + extension, content)
                _add(tar, f"{key}.json", json.dumps(self._fields(row), ensure_ascii=False).encode())

    def _fields(self, row: int) -> dict[str, Any]:
        """Return the content of an image's .json, by the names of a table's columns."""
        listing, label = self.listing, int(self.listing.labels[row])
        fields: dict[str, Any] = {"label": listing.class_names[label]}
        for name, mask in (("query", listing.query), ("gallery", listing.gallery)):
            if mask is not None:
                fields[name] = bool(mask[row])
        if listing.super_classes is not None:
            fields["super_class"] = listing.super_class_names[int(listing.super_classes[label])]
        if listing.groups is not None and not self.alone[row]:
            fields["group"] = int(listing.groups[row])
        return fields | dict(zip(BOX, self.images.box(row) or (), strict=False))

    def _source(self) -> str:
        """Compute a hash of all that the shards' content depends on."""
        source = hashlib.sha256()
        for row in range(len(self)):
            facts = [self.images.key(row), self._fields(row), *stamp(self.images.paths[row])]
            source.update(json.dumps(facts).encode() + b"\0")
        return source.hexdigest()


def member_names(listing: Listing) -> list[tuple[str, str]]:
    """Return a unique key and the extension of each image in its shard, from the name of its file.

    WebDataset ends a key at the first dot, so ``hawk.2.jpg`` becomes ``hawk_2`` and ``.jpg``.

    Raises:
        UserError: a file name does not have the extension of an image.
    """
    taken: set[str] = set()
    found: list[tuple[str, str]] = []
    for row in range(len(listing.labels)):
        path = PurePosixPath(os.path.normpath(listing.names[row]).replace(os.sep, "/"))
        if path.suffix.lower() not in EXTENSIONS:
            raise UserError(
                f"{listing.root / path}: shards identify images by their extension; rename the file to one of "
                f"{', '.join(sorted(EXTENSIONS))}"
            )
        plain = key = str(path.with_name(path.stem.replace(".", "_")))
        number = 1
        while key in taken:  # hawk.jpg next to hawk.png, or two boxes of one image
            number += 1
            key = f"{plain}-{number}"
        taken.add(key)
        found.append((key, path.suffix))
    return found


def _alone(groups: np.ndarray | None) -> np.ndarray:
    """Return (N,) bool, the images that are alone in their group."""
    if groups is None:
        return np.zeros(0, dtype=bool)
    _, places, counts = np.unique(groups, return_inverse=True, return_counts=True)
    return counts[places] == 1


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)  # without times and owners, so that equal images give equal bytes
    member.size = len(content)
    tar.addfile(member, BytesIO(content))


def _check_output(output: Path, manifest: ShardManifest) -> None:
    """Raise a `UserError` unless a folder is empty or contains only shards of the same images."""
    if not output.exists():
        return
    if (output / MANIFEST).exists():
        if ShardManifest.read(output / MANIFEST) != manifest:
            raise UserError(
                f"{output} contains shards of other images, of changed images, or with another --images-per-shard; "
                "use another -o"
            )
    elif not output.is_dir() or any(path.name != LOCK and not is_partial(path) for path in output.iterdir()):
        raise UserError(f"{output} already exists and does not contain shards that dmlkit wrote; use another -o")
