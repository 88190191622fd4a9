"""Manifest of a gallery with its models, and the commit of a version: its rows, and the manifest that names it."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import Field, FiniteFloat

from dmlkit.files.arrays import Values
from dmlkit.files.atomic import atomic_write
from dmlkit.files.image_file import box_cell
from dmlkit.files.lock import sole_writer
from dmlkit.files.outputs import writing
from dmlkit.files.regular import file_checksum
from dmlkit.gallery.files import MANIFEST, ApproximateIndex, GalleryVersion, RecordedGallery, rows_file
from dmlkit.gallery.images import LabelledImage
from dmlkit.vectors.manifest import Description, LocalFusion
from dmlkit.vectors.store import VectorStore

PATIENCE = 600  # seconds that a writer waits for another, of which index, compact and migrate may take longer


class GalleryModel(Description, frozen=True, strict=True):
    """Model that made all embeddings of a version of a gallery, and what holds for its embeddings alone."""

    kind: ClassVar[str] = "model of a gallery"
    renewal: ClassVar[str] = ", or embed all of its images again with dmlkit gallery migrate"

    run: str
    """Run whose model embeds images, at the time of creation or migration."""
    threshold: FiniteFloat | None
    """Similarity below which an image is unknown."""
    threshold_is_own: bool = True
    """Whether the threshold was given for this gallery; otherwise it is that of the run at the time of creation, and a
    newer one of the run replaces it."""
    approximate: ApproximateIndex | None = None
    """Index built by ``dmlkit gallery index``."""
    local: LocalFusion | None = None
    """Local features of all images; null if there are none."""


class GalleryManifest(RecordedGallery, GalleryModel, frozen=True, strict=True):
    """``gallery.json``: the model of the newest version of a gallery, its options and its versions."""

    others: dict[str, GalleryModel] = Field(default_factory=dict[str, GalleryModel])
    """Models of other versions by their names, see ``dmlkit gallery migrate``."""

    def of_model(self, name: str) -> Self:
        """Return the manifest with one of its models described first; an unknown name is a `KeyError`."""
        if name == self.current:
            return self
        current = GalleryModel(**{field: getattr(self, field) for field in GalleryModel.model_fields})
        others = {**self.others, self.current: current}
        return self.model_copy(update={**dict(others.pop(name)), "current": name, "others": others})


@contextmanager
def changing(path: Path) -> Generator[GalleryManifest]:
    """Lock a gallery for one writer, and yield the manifest."""
    with sole_writer(path, what="a change of a gallery", patience=PATIENCE), writing(path / MANIFEST):
        yield GalleryManifest.of(path)


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
