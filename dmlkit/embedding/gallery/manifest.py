"""Manifest of a gallery, its versions, and the checksums of its rows."""

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self
from zlib import crc32

import numpy as np
from pydantic import Field, FiniteFloat

from dmlkit.datasets.files.table_file import SightingCells
from dmlkit.embedding.gallery.files import (
    MANIFEST,
    ApproximateIndex,
    Content,
    GalleryState,
    RecordedGallery,
    way_back,
)
from dmlkit.embedding.gallery.table import model_name, reading
from dmlkit.embedding.manifest import Description, LocalFusion
from dmlkit.errors import UserError, counted
from dmlkit.files.arrays import Values
from dmlkit.files.source import require_gallery


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
    """Local features of all images, in the column ``local``; null if there are none."""


class GalleryManifest(RecordedGallery, GalleryModel, frozen=True, strict=True):
    """``gallery.json``: the model of all embeddings of a gallery, its options and its checksums."""

    others: dict[str, GalleryModel] = Field(default_factory=dict[str, GalleryModel])
    """Models of other versions by their names, see ``dmlkit gallery migrate``."""

    def of_model(self, name: str) -> Self:
        """Return the manifest with one of its models described first; an unknown name is a `KeyError`."""
        if name == self.current:
            return self
        fields = GalleryModel.model_fields
        first = GalleryModel(**{field: getattr(self, field) for field in fields})
        others = {**self.others, self.current: first}
        return self.model_copy(update={**dict(others.pop(name)), "current": name, "others": others})


def manifest_at(path: Path, manifest: GalleryManifest, table: Any) -> GalleryManifest:
    """Return a manifest with the model of a table's version described first; to be called while `reading`.

    A migration names its model in ``gallery.json`` before its only commit, so that every reader knows the model. The
    manifest was read before the table was opened.
    """
    name = model_name(table)
    if name not in (manifest.current, *manifest.others):  # the migration began in the meantime
        newer = read_gallery_manifest(path)
        manifest = newer.model_copy(update={"contents": manifest.contents})
    try:
        return manifest.of_model(name)
    except KeyError:
        raise ValueError(f"gallery.json does not describe the model {name} of its table") from None


def read_gallery_manifest(path: Path) -> GalleryManifest:
    """Return the manifest of a gallery.

    Raises:
        UserError: there is no gallery, its creation was interrupted, or it is damaged.
    """
    require_gallery(path)
    return GalleryManifest.read(path / MANIFEST)


CHECKED = ("id", "label", "path", "thumbnail", "point", "vector", *SightingCells._fields, "box", "local")
"""Columns that have a checksum, in the order of the checksums; galleries up to format 8 have the first six, those of
format 9 the first nine, and those without local features all but the last."""
CHECKSUM = "checksum"
BLOCK = 65_536  # rows whose checksums are added at once


def column_checksums(column: Any) -> Values:
    """Return the CRC-32 (n,) of each value of an Arrow column; 0 for a null.

    Of 100 000 points of 512 dimensions it takes 0.11 s, where LanceDB 0.40 reads them in 0.4 to 1.6 s.
    """
    import pyarrow as pa

    if pa.types.is_fixed_size_list(column.type):
        values: Any = np.ascontiguousarray(matrix_of(column))
    else:
        values = column.cast(pa.binary()).to_pylist()
    return np.array([0 if value is None else crc32(value, 1) for value in values], np.uint32)


def row_checksums(columns: Iterable[Any]) -> Any:
    """Return the Arrow column of checksums of rows, given their first `CHECKED` columns."""
    return lists_of(np.stack([column_checksums(column) for column in columns], axis=1))


def lists_of(values: Values) -> Any:
    """Return the rows of a matrix (n, D) as an Arrow column of lists of D numbers; see `matrix_of`."""
    import pyarrow as pa

    return pa.FixedSizeListArray.from_arrays(pa.array(np.ascontiguousarray(values).ravel()), values.shape[1])


def matrix_of(column: Any) -> Values:
    """Return an Arrow column of lists of D numbers as a matrix (n, D)."""
    return column.flatten().to_numpy().reshape(-1, column.type.list_size)


def checksum_field(width: int) -> Any:
    """Return the Arrow field of the checksums of so many columns."""
    import pyarrow as pa

    return pa.field(CHECKSUM, pa.list_(pa.uint32(), width), nullable=False)


def check_rows(path: Path, batch: Any, columns: Sequence[str], numbers: Sequence[int]) -> None:
    """Raise a `UserError` unless columns of some rows, given by their numbers, have the checksums in an Arrow batch."""
    stored = matrix_of(batch.column(CHECKSUM))
    for name in columns:
        differ = column_checksums(batch.column(name)) != stored[:, CHECKED.index(name)]
        if differ.any():
            raise UserError(
                f"{path}: this gallery is damaged: the {name} of {counted(int(differ.sum()), 'row', 'rows')} is not "
                f"what was written, first of row {numbers[int(differ.argmax())]}; {way_back(path)}"
            )


def content_of(table: Any) -> Content:
    """Return how many rows a table has at its version, and the sum of their checksums; to be called while `reading`."""
    rows = total = 0
    for batch in table.search().select([CHECKSUM]).to_batches(BLOCK):
        rows += batch.num_rows
        total += int(matrix_of(batch.column(0)).sum(dtype=np.uint64))
    return Content(rows, total)


def state_of(table: Any, approximate: ApproximateIndex | None) -> GalleryState:
    """Return what a table holds at its version, given its manifest's index; to be called while `reading`."""
    counts = Counter[str | None]()
    for batch in table.search().select(["label"]).to_batches(BLOCK):
        counts.update(batch.column("label").to_pylist())
    unlabeled = counts.pop(None, 0)
    has_index = approximate is not None and any(one.name == approximate.name for one in table.list_indices())
    rows = unlabeled + counts.total()
    return GalleryState(
        version=table.version,
        labels={str(label): count for label, count in sorted(counts.items(), key=lambda one: str(one[0]))},
        without_label=unlabeled,
        has_index=has_index,
        not_indexed=table.index_stats(approximate.name).num_unindexed_rows if approximate and has_index else rows,
    )


def check_content(path: Path, manifest: GalleryManifest, table: Any, *, is_newest: bool = True) -> bool:
    """Raise an error unless a version of a gallery has the rows that it had when it was written.

    Args:
        manifest: manifest, read before the table was opened.
        is_newest: whether LanceDB takes the version for the newest one.

    Returns:
        Whether its rows have checksums; those of older galleries have none.

    Raises:
        UserError: rows are missing or reappeared, or the table cannot be read.
    """
    with reading(path):
        version, has_checksums = table.version, CHECKSUM in table.schema.names
        if not manifest.contents and not has_checksums:
            return False
        found = content_of(table)
    newest = max(manifest.contents, default=0)
    if is_newest and version < newest:
        raise UserError(
            f"{path}: this gallery is damaged: its newest version is {newest}, but the newest in images.lance is "
            f"{version}; {way_back(path)}"
        )
    expected = manifest.contents.get(version, found)
    if found != expected:
        what = "the checksums of its rows are" if found.images == expected.images else f"{found.images} rows are there"
        raise UserError(
            f"{path}: this gallery is damaged: {what} not what version {version} was written with "
            f"({expected.images} rows); {way_back(path)}"
        )
    return True
