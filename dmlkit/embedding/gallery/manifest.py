"""Files of a gallery: its manifest, LanceDB's files, and the checksums that show damage."""

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from datetime import datetime
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self
from uuid import UUID
from zlib import crc32

import numpy as np
from pydantic import BaseModel, Field, FiniteFloat, PositiveInt

from dmlkit.embedding.manifest import Description, file_checksum
from dmlkit.errors import UserError
from dmlkit.files.arrays import Values
from dmlkit.files.source import require_gallery

MANIFEST, CREATING, TABLE = "gallery.json", "creating.json", "images"
TABLE_FOLDER = f"{TABLE}.lance"
INCOMING = "incoming-"  # start of the name of a folder with the embeddings of images that are not yet added
IndexKind = Literal["ivf_pq", "ivf_hnsw_sq"]


class ApproximateIndex(BaseModel, frozen=True, extra="forbid", strict=True):
    """Approximate index, and how far a search through it goes."""

    name: str
    """LanceDB's name; if the table has no index of this name, the search is exact."""
    kind: IndexKind
    """Representation of vectors in the index."""
    nprobes: PositiveInt
    """Number of parts of the index that a search visits."""
    candidates: Annotated[FiniteFloat, Field(gt=0)]
    """Number of images compared exactly per requested neighbor."""
    recall: FiniteFloat
    """Share of the 10 nearest images that it found, measured on images of the gallery."""


class Content(NamedTuple):
    """Contents of a version of a gallery when it was written."""

    images: int
    checksum: int  # the sum of the checksums of all rows: their order may change


class FileStamp(NamedTuple):
    """Size in bytes and time of modification of a file."""

    size: int
    nanoseconds: int

    @classmethod
    def of(cls, path: Path) -> Self:
        """Return the stamp of a file."""
        found = path.stat()
        return cls(found.st_size, found.st_mtime_ns)


class GalleryManifest(Description, frozen=True, strict=True):
    """``gallery.json``: the model of all embeddings of a gallery, its options and its checksums."""

    kind: ClassVar[str] = "manifest of a gallery"
    version: ClassVar[int] = 6
    # 1 had no index; 2 no checksums; 3 those of manifests and deletions alone; 4 no threshold_is_own; 5 no fusion
    older: ClassVar[dict[int, tuple[str, ...]]] = {1: (), 2: (), 3: (), 4: (), 5: ()}

    run: str
    """Run whose model embeds images, at the time of creation."""
    thumbnails: bool
    """Whether rows have small pictures."""
    threshold: FiniteFloat | None
    """Similarity below which an image is unknown."""
    threshold_is_own: bool = True
    """Whether the threshold was given for this gallery; otherwise it is that of the run at the time of creation, and a
    newer one of the run replaces it."""
    approximate: ApproximateIndex | None = None
    """Index built by ``dmlkit gallery index``."""
    contents: dict[int, Content] = Field(default_factory=dict[int, Content])
    """Contents by version; empty if rows have no checksums. A version may be missing if its writer was killed."""
    files: dict[str, int] = Field(default_factory=dict[str, int])
    """CRC-32 of LanceDB's files, which never change: manifests, deletions, rows and indices."""
    stamps: dict[str, FileStamp] = Field(default_factory=dict[str, FileStamp])
    """Stamps of the files of rows and indices; a file that still has its stamp is not compared with its checksum."""


class GalleryVersion(NamedTuple):
    """State of a gallery that can be restored."""

    number: int
    time: datetime
    images: int


def holds_gallery(path: Path) -> bool:
    """Return whether a folder is a gallery."""
    return (path / MANIFEST).exists()


def read_gallery_manifest(path: Path) -> GalleryManifest:
    """Return the manifest of a gallery.

    Raises:
        UserError: there is no gallery, its creation was interrupted, or it is damaged.
    """
    require_gallery(path)
    return GalleryManifest.read(path / MANIFEST)


def check_threshold(threshold: float | None) -> None:
    """Raise an error for a threshold with which no similarity can be compared.

    Raises:
        UserError: the threshold is nan or infinite.
    """
    if threshold is not None and not isfinite(threshold):
        raise UserError(f"--threshold {threshold}: expected a similarity, which is a finite number")


def lancedb() -> Any:
    """Return the package ``lancedb``, which stores galleries and exported tables.

    Raises:
        UserError: it is not installed.
    """
    import os
    import warnings

    os.environ.setdefault("LANCEDB_LOG", "error")  # it warns of its own defaults
    # loader processes are forked after it is imported; they decode images and never call it
    warnings.filterwarnings("ignore", message="lancedb fork support")
    try:
        import lancedb as package
    except ImportError:
        raise UserError("this needs LanceDB; install it with: pip install 'dmlkit[gallery]'") from None
    return package


CHECKED = ("id", "label", "path", "thumbnail", "point", "vector")
"""Columns that have a checksum, in the order of the checksums."""
CHECKSUM = "checksum"
FAULTS = (OSError, RuntimeError, ValueError, LookupError, ArithmeticError)
"""Exceptions of LanceDB and Arrow for damaged files."""
BLOCK = 65_536  # rows whose checksums are added at once


def way_back(path: Path) -> str:
    """Return what to do about a damaged gallery that can be opened."""
    return (
        f"restore the files of this folder from a backup, or an earlier version: dmlkit gallery history {path} lists "
        f"them, dmlkit gallery restore {path} VERSION brings one back"
    )


@contextmanager
def reading(path: Path, doing: str = "read", advice: str | None = None) -> Generator[None]:
    """Turn any exception of LanceDB into one error that names the gallery.

    A panic of its Rust code may be a BaseException that is not an Exception. The line that Rust prints about it stays,
    since suppressing it would redirect stderr for all threads of the process.

    Args:
        path: the gallery.
        doing: verb for what the block does with it.
        advice: what to do about the error. Default: restore its files or an earlier version.

    Raises:
        UserError: the block fails.
    """
    try:
        yield
    except BaseException as error:
        is_panic = type(error).__name__ in ("PanicException", "RustPanic")
        if not is_panic and (isinstance(error, UserError) or not isinstance(error, FAULTS)):
            raise
        reason = (str(error).splitlines() or [""])[0] or type(error).__name__
        raise UserError(f"{path}: cannot {doing} this gallery: {reason}; {advice or way_back(path)}") from error


def _manifests(path: Path) -> dict[int, Path]:
    """Return LanceDB's manifests by version; it counts from above, so that the newest is listed first."""
    found: dict[int, Path] = {}
    for file in (path / TABLE_FOLDER / "_versions").glob("*.manifest"):
        number = int(file.stem) if file.stem.isdecimal() else 0
        found[2**64 - 1 - number if number >= 2**63 else number] = file
    return found


def _deletions(path: Path) -> list[Path]:
    return sorted((path / TABLE_FOLDER / "_deletions").glob("*"))


def _large_files(path: Path) -> list[Path]:
    """Return the files of rows and indices."""
    table = path / TABLE_FOLDER
    return sorted(file for place in ("data/*", "_indices/*/*") for file in table.glob(place))


def _name_in_manifest(file: Path) -> bytes:
    """Return how the manifests that use a file of rows or indices name it: by its name, or the UUID of its index."""
    try:
        return UUID(file.parent.name).bytes
    except ValueError:
        return file.name.encode()


def recorded_files(path: Path, manifest: GalleryManifest) -> dict[str, Any]:
    """Return the checksums and stamps of a gallery's files, as fields of its manifest; known files are not read."""
    files, stamps, large = dict(manifest.files), dict(manifest.stamps), _large_files(path)
    for file in (*_manifests(path).values(), *_deletions(path), *large):
        name = file.relative_to(path).as_posix()
        if name not in files:
            files[name] = file_checksum(file)
            stamps |= {name: FileStamp.of(file)} if file in large else {}
    return {"files": files, "stamps": stamps}


def check_files(
    path: Path,
    manifest: GalleryManifest,
    version: int | None = None,
    *,
    all_versions: bool = False,
    trust_stamps: bool = True,
) -> None:
    """Raise an error for a file that is not what was written, before LanceDB reads it.

    For some damages it requests memory of an absurd size, and the process is aborted or, where the system grants the
    request, killed after it has filled the memory: there is no error to catch.

    Args:
        path: the gallery.
        manifest: its manifest.
        version: the version whose manifest, rows and indices to check. Default: the newest.
        all_versions: check the manifests of all versions, and no rows.
        trust_stamps: do not read files of rows and indices that have the size and time with which they were written.

    Raises:
        UserError: a file has another checksum.
    """

    def check(file: Path, advice: str) -> None:
        name = file.relative_to(path).as_posix()
        if not file.exists():
            raise UserError(f"{path}: this gallery is damaged: {name} is missing; {advice}")
        known = name not in manifest.files or (trust_stamps and manifest.stamps.get(name) == FileStamp.of(file))
        if not known and file_checksum(file) != manifest.files[name]:
            raise UserError(f"{path}: this gallery is damaged: {name} is not what was written; {advice}")

    manifests = _manifests(path)
    newest = max(manifests, default=0) if version is None else version
    listed = [*manifests.values()] if all_versions else [manifests[newest]] if newest in manifests else []
    for file in (*listed, *_deletions(path)):
        check(file, "restore this file from a backup, or create the gallery again")
    if listed and not all_versions:
        content = listed[0].read_bytes()
        for file in sorted({*_large_files(path), *(path / name for name in manifest.stamps)}):
            if _name_in_manifest(file) in content:
                check(file, way_back(path))


def column_checksums(column: Any) -> Values:
    """Return the CRC-32 (n,) of each value of an Arrow column; 0 for a null.

    Of 100 000 points of 512 dimensions it takes 0.11 s, where LanceDB 0.40 reads them in 0.4 to 1.6 s.
    """
    import pyarrow as pa

    if pa.types.is_fixed_size_list(column.type):
        values: Any = np.ascontiguousarray(column.flatten().to_numpy()).reshape(-1, column.type.list_size)
    else:
        values = column.cast(pa.binary()).to_pylist()
    return np.array([0 if value is None else crc32(value, 1) for value in values], np.uint32)


def row_checksums(columns: Iterable[Any]) -> Any:
    """Return the Arrow column of checksums of rows whose `CHECKED` columns are given."""
    import pyarrow as pa

    values = np.stack([column_checksums(column) for column in columns], axis=1)
    return pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), len(CHECKED))


def check_rows(path: Path, batch: Any, columns: Sequence[str], numbers: Sequence[int]) -> None:
    """Raise an error unless columns of some rows are what was written.

    Args:
        path: the gallery.
        batch: Arrow arrays with the columns and the checksums.
        columns: names of the columns to check.
        numbers: numbers of the rows, for the error.

    Raises:
        UserError: a value has another checksum.
    """
    stored = _checksums(batch.column(CHECKSUM))
    for name in columns:
        differ = column_checksums(batch.column(name)) != stored[:, CHECKED.index(name)]
        if differ.any():
            raise UserError(
                f"{path}: this gallery is damaged: the {name} of {differ.sum()} row(s) is not what was written, first "
                f"of row {numbers[int(differ.argmax())]}; {way_back(path)}"
            )


def content_of(table: Any) -> Content:
    """Return how many rows a table has at its version, and the sum of their checksums; to be called while `reading`."""
    rows = total = 0
    for batch in table.search().select([CHECKSUM]).to_batches(BLOCK):
        rows += batch.num_rows
        total += int(_checksums(batch.column(0)).sum(dtype=np.uint64))
    return Content(rows, total)


def check_content(path: Path, manifest: GalleryManifest, table: Any, *, is_newest: bool = True) -> bool:
    """Raise an error unless a version of a gallery has the rows that it had when it was written.

    Args:
        path: the gallery.
        manifest: manifest, read before the table was opened.
        table: table, at the version.
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


def _checksums(column: Any) -> Values:
    return column.flatten().to_numpy().reshape(-1, len(CHECKED))
