"""One commit of a gallery: a part of new points, the rows of a version, and the manifest that names both."""

import os
import shutil
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, NamedTuple
from uuid import uuid4

import numpy as np
import torch
from numpy.lib import format as npy
from torch import Tensor

from dmlkit.datasets.files.image import thumbnail
from dmlkit.datasets.files.table_file import SightingCells
from dmlkit.files.atomic import atomic_write
from dmlkit.files.image_file import box_cell
from dmlkit.files.lock import sole_writer
from dmlkit.files.outputs import writing
from dmlkit.files.regular import file_checksum
from dmlkit.gallery.files import (
    MANIFEST,
    VECTORS,
    GalleryVersion,
    StoredPart,
    rows_file,
    thumbnail_file,
)
from dmlkit.gallery.folder import LOCAL, POINTS, GalleryFolder
from dmlkit.gallery.images import LabelledImage
from dmlkit.gallery.manifest import GalleryManifest, read_gallery_manifest
from dmlkit.manifolds.base import check_points
from dmlkit.manifolds.euclidean import Euclidean
from dmlkit.vectors.in_memory import UNSOUND
from dmlkit.vectors.parts import PartFolder

PATIENCE = 600  # seconds that a writer waits for another, which holds a gallery for one commit alone


class PointBlock(NamedTuple):
    """Embeddings of some images."""

    ids: list[str]
    points: Tensor  # (n, D) float32
    local: Tensor | None  # (n, P, C) float16


@contextmanager
def changing(path: Path) -> Generator[GalleryManifest]:
    """Lock a gallery for one writer, remove what a killed writer has left, and yield the manifest.

    Raises:
        UserError: another process keeps the lock, or the gallery cannot be read or written.
    """
    with sole_writer(path, what="a change of a gallery", patience=PATIENCE), writing(path / MANIFEST):
        manifest = read_gallery_manifest(path)
        for folder in (path / VECTORS).glob("*"):
            if folder.name not in manifest.parts:
                shutil.rmtree(folder, ignore_errors=True)
        yield manifest


def commit(path: Path, manifest: GalleryManifest, rows: Any) -> GalleryManifest:
    """Write the rows of a new version of a gallery, and then the manifest that makes it the newest one.

    Args:
        manifest: manifest with the model and the parts of the new version.
        rows: the rows, an Arrow table.
    """
    from pyarrow import parquet

    number = manifest.versions[-1].number + 1 if manifest.versions else 1
    file = rows_file(path, number)
    file.parent.mkdir(exist_ok=True)
    with atomic_write(file) as partial:
        parquet.write_table(rows, partial, compression="zstd")
        checksum = file_checksum(partial)
    version = GalleryVersion(
        number=number,
        time=datetime.now(UTC),
        images=len(rows),
        model=manifest.current,
        rows=number,
        checksum=checksum,
    )
    changed = manifest.model_copy(update={"versions": (*manifest.versions, version)})
    changed.write(path / MANIFEST)
    return changed


def blocks_of(ids: list[str], parts: PartFolder) -> Iterator[PointBlock]:
    """Yield the embeddings of images, given by the ids of the list that was embedded, a part at a time."""
    for part in parts.read():
        yield PointBlock([ids[row] for row in part.indices.tolist()], part.points, part.local)


def write_part(
    path: Path, manifest: GalleryManifest, images: Mapping[str, LabelledImage], blocks: Iterable[PointBlock]
) -> tuple[GalleryManifest, Any]:
    """Write the points of images, given by their ids, into a new part, and their thumbnails.

    Args:
        images: the images of the part.
        blocks: their embeddings, and perhaps those of others, which are left out.

    Returns:
        The manifest with the part, and the rows of its images in an Arrow table.

    Raises:
        UserError: a point has no vector of an index.
    """
    name, manifold = uuid4().hex[:12], manifest.build_manifold()
    shapes: dict[str, tuple[tuple[int, ...], type]] = {POINTS: ((manifest.dim,), np.float32)}
    shapes |= {LOCAL: (manifest.local.shape, np.float16)} if manifest.local else {}
    written = list[str]()
    with _files(path / VECTORS / name, shapes, len(images)) as files:
        for block in blocks:
            kept = [row for row, one in enumerate(block.ids) if one in images]
            paths = [images[block.ids[row]].path for row in kept]
            written += [block.ids[row] for row in kept]
            points = block.points[kept]
            vectors = manifold.index_vectors(points.double(), "gallery").float()
            # numbers near 1e38 may be points of flat space, while their squares are none
            check_points(Euclidean(vectors.shape[1]), vectors, paths.__getitem__, UNSOUND)
            for file, tensor in ((POINTS, points), (LOCAL, block.local)):
                if file in files and tensor is not None:
                    files[file].write((tensor if file == POINTS else tensor[kept]).contiguous().numpy().tobytes())
    if manifest.thumbnails:
        _write_thumbnails(path, {one: images[one] for one in written})
    checksums = {file: file_checksum(path / VECTORS / name / file) for file in shapes}
    part = StoredPart(images=len(written), checksums=checksums)
    rows = _rows([(one, images[one]) for one in written], name, manifest.numbers)
    numbers = manifest.numbers + len(written)
    return manifest.model_copy(update={"parts": {**manifest.parts, name: part}, "numbers": numbers}), rows


def copied_part(gallery: GalleryFolder, rows: int = 8192) -> Iterator[PointBlock]:
    """Yield the embeddings of a gallery, some rows at a time."""
    for chosen in torch.arange(len(gallery)).split(rows):
        local = gallery.local_at(chosen) if gallery.manifest.local else None
        yield PointBlock([gallery.ids[row] for row in chosen.tolist()], gallery.points_at(chosen), local)


@contextmanager
def _files(
    folder: Path, shapes: Mapping[str, tuple[tuple[int, ...], type]], count: int
) -> Generator[dict[str, IO[bytes]]]:
    """Open the NumPy files of a part behind their headers, yield them, and flush them to the disk at the end.

    A file that is written, unlike one that is mapped, raises an error where the disk is full.
    """
    folder.mkdir(parents=True)
    files: dict[str, IO[bytes]] = {}
    try:
        for name, (shape, dtype) in shapes.items():
            files[name] = (folder / name).open("wb")
            header = {"descr": npy.dtype_to_descr(np.dtype(dtype)), "fortran_order": False, "shape": (count, *shape)}
            npy.write_array_header_1_0(files[name], header)
        yield files
        for file in files.values():
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        for file in files.values():
            file.close()


def _write_thumbnails(path: Path, images: Mapping[str, LabelledImage]) -> None:
    """Write small pictures under the ids of their images, so that every version and model shares them."""
    for name, image in images.items():
        file = thumbnail_file(path, name)
        if not file.exists():
            file.parent.mkdir(exist_ok=True)
            with atomic_write(file) as partial:
                partial.write_bytes(thumbnail(image.path, image.box))


def schema() -> Any:
    """Return the columns of the rows of a version."""
    import pyarrow as pa

    texts = ("id", "label", "path", *SightingCells._fields, "box", "part")
    fields = [*(pa.field(name, pa.string()) for name in texts), pa.field("row", pa.int64())]
    return pa.schema([*fields, pa.field("number", pa.int64()), pa.field("added", pa.timestamp("us", "UTC"))])


def _rows(images: list[tuple[str, LabelledImage]], part: str, first: int) -> Any:
    """Return the rows of the images of a part, with numbers from ``first`` on."""
    import pyarrow as pa

    columns: dict[str, list[Any]] = {
        "id": [name for name, _ in images],
        "label": [image.label for _, image in images],
        "path": [image.path for _, image in images],
        **{name: [getattr(image.sighting, name) for _, image in images] for name in SightingCells._fields},
        "box": [box_cell(image.box) for _, image in images],
        "part": [part] * len(images),
        "row": list(range(len(images))),
        "number": list(range(first, first + len(images))),
        "added": [datetime.now(UTC)] * len(images),
    }
    return pa.table(columns, schema=schema())


def moved(rows: Any, part: str, paths: list[str] | None = None) -> Any:
    """Return rows whose points are now in another part, in the same order, and whose files may have moved."""
    import pyarrow as pa

    columns: dict[str, Any] = {"part": pa.array([part] * len(rows), pa.string()), "row": pa.array(range(len(rows)))}
    columns |= {} if paths is None else {"path": pa.array(paths, pa.string())}
    for name, column in columns.items():
        rows = rows.set_column(rows.schema.get_field_index(name), schema().field(name), column)
    return rows
