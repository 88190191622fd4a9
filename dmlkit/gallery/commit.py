"""One commit of a gallery: the rows of a version, whose points are in the store, and the manifest that names it."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dmlkit.files.arrays import Values
from dmlkit.files.atomic import atomic_write
from dmlkit.files.image_file import box_cell
from dmlkit.files.lock import sole_writer
from dmlkit.files.outputs import writing
from dmlkit.files.regular import file_checksum
from dmlkit.gallery.files import MANIFEST, GalleryVersion, rows_file
from dmlkit.gallery.images import LabelledImage
from dmlkit.gallery.manifest import GalleryManifest, read_gallery_manifest
from dmlkit.vectors.store import VectorStore

PATIENCE = 600  # seconds that a writer waits for another, of which index, compact and migrate may take longer


@contextmanager
def changing(path: Path) -> Generator[GalleryManifest]:
    """Lock a gallery for one writer, and yield the manifest."""
    with sole_writer(path, what="a change of a gallery", patience=PATIENCE), writing(path / MANIFEST):
        yield read_gallery_manifest(path)


def commit(path: Path, manifest: GalleryManifest, rows: Any, name: str = MANIFEST) -> GalleryManifest:
    """Write the rows of a new version of a gallery, and then the manifest that makes it the newest one."""
    from pyarrow import parquet

    number = manifest.versions[-1].number + 1 if manifest.versions else 1
    file = rows_file(path, number)
    file.parent.mkdir(exist_ok=True)
    with atomic_write(file) as partial:
        parquet.write_table(rows, partial, compression="zstd")
        checksum = file_checksum(partial)
    details: Any = {"time": datetime.now(UTC), "images": len(rows), "model": manifest.current, "checksum": checksum}
    version = GalleryVersion(number=number, rows=number, **details)
    changed = manifest.model_copy(update={"versions": (*manifest.versions, version)})
    changed.write(path / name)
    return changed


def schema() -> Any:
    """Return the columns of the rows of a version."""
    import pyarrow as pa

    texts = ("id", "label", "path", "box", "cells", "part")
    fields = [*(pa.field(name, pa.string()) for name in texts), pa.field("row", pa.int64())]
    return pa.schema([*fields, pa.field("number", pa.int64()), pa.field("added", pa.timestamp("us", "UTC"))])


def new_rows(images: Mapping[str, LabelledImage], store: VectorStore, places: Values, first: int) -> Any:
    """Return the rows of a version for images by their ids, whose points are in rows of a store.

    Args:
        first: the number of the first image; those of the others follow.
    """
    import pyarrow as pa

    added = datetime.now(UTC)
    rows = [
        vars(image) | {"id": name, "box": box_cell(image.box), "number": number, "added": added}
        for number, (name, image) in enumerate(images.items(), first)
    ]
    return moved(pa.Table.from_pylist(rows, schema=schema()), store, places)


def moved(table: Any, store: VectorStore, rows: Values, paths: list[str] | None = None) -> Any:
    """Return rows of a version whose points are now in rows of a store, and whose files may have moved."""
    import pyarrow as pa

    numbers, part_rows = store.places(rows)
    parts = [f"{store.path.name}/{name}" for name in store.parts]
    columns: dict[str, Any] = {"part": pa.array([parts[number] for number in numbers.tolist()], pa.string())}
    columns |= {"row": pa.array(part_rows)} | ({} if paths is None else {"path": pa.array(paths, pa.string())})
    for name, column in columns.items():
        table = table.set_column(table.schema.get_field_index(name), schema().field(name), column)
    return table
