"""Tar archives read in place: members, their index, and images within."""

import os
import tarfile
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from dmlkit.errors import UserError, first_line
from dmlkit.files.atomic import atomic_write
from dmlkit.files.document import Document
from dmlkit.files.outputs import BOX, writing
from dmlkit.files.regular import check_regular, require_regular_file

MAX_BYTES = 640_000_000  # size of an image: the limit of 80 megapixels with 8 bytes each
MOST_OPEN = 64  # tar files that a process keeps open; macOS allows 256 files, and opening takes 1 ms on a network


class Stamp(NamedTuple):
    """Size and modification time of a file, by which a change is noticed."""

    bytes: int
    modified: int
    """Modification time in nanoseconds."""


class Place(NamedTuple):
    """Place of an image in its tar file, in bytes."""

    offset: int
    size: int


class OpenFile:
    """File descriptor that is closed when the object is no longer referenced."""

    def __init__(self, path: str) -> None:
        check_regular(path)
        self.descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


def stamp_of(path: str) -> Stamp:
    """Return the stamp of a file.

    Raises:
        OSError: the file is missing.
    """
    status = os.stat(path)  # noqa: PTH116 - Path takes twice the time, for each of thousands of files
    return Stamp(status.st_size, status.st_mtime_ns)


def read_place(path: str, place: Place, stamp: Stamp) -> bytes:
    """Read bytes of a tar file that had this stamp when their place was looked up.

    Raises:
        OSError: the file is missing or has changed since, or the place is larger than an image may be.
    """
    if place.size > MAX_BYTES:
        raise OSError(f"the image has {place.size:,} bytes; expected at most {MAX_BYTES:,}")
    file = _opened(os.path.abspath(path), stamp)  # noqa: PTH100 - Path takes ten times as long, for every image
    status = os.fstat(file.descriptor)
    if (status.st_size, status.st_mtime_ns) != stamp:
        raise OSError(f"{path} has changed since the command started to read it; rerun the command")
    content = os.pread(file.descriptor, place.size, place.offset)
    while len(content) < place.size:  # a network file system may return fewer bytes per call
        more = os.pread(file.descriptor, place.size - len(content), place.offset + len(content))
        if not more:
            raise OSError(f"{path} is truncated: it ends within this image")
        content += more
    return content


@lru_cache(maxsize=MOST_OPEN)
def _opened(path: str, stamp: Stamp) -> OpenFile:  # noqa: ARG001 - part of the cache key: a replaced file is opened again
    return OpenFile(path)


INDEX = "shards.parquet"
"""Name of the index file, in the folder of the shards or of their splits."""
KEY = b"dmlkit"
TEXTS = ("label", "query", "gallery", "super_class", "group")
COLUMNS = {
    "shard": "string",
    "name": "string",
    "offset": "int64",
    "size": "int64",
    **dict.fromkeys(TEXTS, "string"),
    **dict.fromkeys(BOX, "double"),
    "fault": "string",
}
"""Columns with their Arrow types. A row is an image of a shard, or a problem with one."""


class ShardIndex(Document, frozen=True, strict=True):
    """Document in the metadata of an index."""

    kind: ClassVar[str] = "index of shards"

    shards: dict[str, Stamp]
    """Size in bytes and modification time in nanoseconds, by the shard's name relative to the root."""


def read_index(path: Path, shard: str | None = None) -> tuple[ShardIndex, Any]:
    """Read the document and the rows of an index, or only the rows of one shard; the rows are a pyarrow table.

    Raises:
        UserError: the file is missing, damaged, or not an index by dmlkit.
    """
    from pyarrow import ArrowException, parquet

    again = "remove it so that it is written again, or set dataset.index to another file"
    require_regular_file(path)
    try:
        filters = None if shard is None else [("shard", "==", shard)]
        table: Any = parquet.read_table(path, filters=filters, page_checksum_verification=True)
    except (OSError, ArrowException) as error:
        raise UserError(f"{path}: cannot read this index of shards: {first_line(error)}; {again}") from error
    written = (table.schema.metadata or {}).get(KEY)
    kinds = {name: str(table.schema.field(name).type) for name in table.column_names}
    if written is None or kinds != COLUMNS:
        raise UserError(f"{path} is not an index of shards that dmlkit wrote; {again}")
    try:
        return ShardIndex.from_json(written.decode(), str(path)), table
    except UserError as error:
        raise UserError(f"{error}; {again}") from error


def write_index(path: Path, stamps: dict[str, Stamp], tables: Iterable[Any]) -> None:
    """Write an index atomically, with one row group per table; each table has the images of one shard.

    Raises:
        UserError: the file cannot be written.
    """
    import pyarrow as pa
    from pyarrow import parquet

    document = ShardIndex(shards=stamps).text()
    kinds = arrow_schema().with_metadata({KEY: document.encode()})
    with (
        writing(path, pa.ArrowException),
        atomic_write(path) as partial,
        parquet.ParquetWriter(partial, kinds, write_page_checksum=True) as writer,
    ):
        for table in tables:
            writer.write_table(table.cast(kinds))


def arrow_schema() -> Any:
    """Return the Arrow schema of an index."""
    import pyarrow as pa

    return pa.schema([(name, pa.type_for_alias(kind)) for name, kind in COLUMNS.items()])


def arrow_table(rows: Sequence[dict[str, Any]]) -> Any:
    """Convert rows of an index to a pyarrow table; missing values are null."""
    import pyarrow as pa

    return pa.Table.from_pylist(list(rows), schema=arrow_schema())


SUFFIX = ".tar"


def shard_and_name(path: str) -> tuple[str, str] | None:
    """Split a path into its tar file and the name of the image in it; return None for any other path."""
    end = path.find(f"{SUFFIX}/")
    while end >= 0:
        shard = path[: end + len(SUFFIX)]
        if os.path.isfile(shard):  # noqa: PTH113 - a folder may be named like this; Path takes twice the time
            return shard, path[end + len(SUFFIX) + 1 :]
        end = path.find(f"{SUFFIX}/", end + 1)
    return None


def content_in_shard(path: str) -> bytes | None:
    """Return the content of a file inside a tar file; None for any other path.

    Raises:
        OSError: the file cannot be read.
    """
    found = shard_and_name(path)
    if found is None:
        return None
    shard, name = found
    stamp = stamp_of(shard)
    place = _places(os.path.abspath(shard), stamp).get(name)  # noqa: PTH100 - as in `read_place`
    if place is None:
        raise FileNotFoundError(path)
    return read_place(shard, place, stamp)


def file_content(path: str) -> bytes:
    """Return the content of a file, which may be inside a tar file.

    Raises:
        OSError: the file cannot be read, or is not regular.
    """
    content = content_in_shard(path)
    if content is None:
        check_regular(path)
        content = Path(path).read_bytes()
    return content


@lru_cache(maxsize=16)  # an entry for 10 000 images takes 3 MB
def _places(shard: str, stamp: Stamp) -> dict[str, Place]:
    """Return the places of a tar file's members, from an up-to-date index above it or else from its headers."""
    path = Path(shard)
    for root in (path.parent, path.parent.parent):
        name = path.relative_to(root).as_posix()
        try:
            document, table = read_index(root / INDEX, name)
        except UserError:
            continue
        if document.shards.get(name) == stamp:
            rows = table.select(["name", "offset", "size"]).to_pylist()
            return {row["name"]: Place(row["offset"], row["size"]) for row in rows if row["offset"] is not None}
    try:
        with tarfile.open(path, "r:") as tar:
            return {
                plain_name(member.name): Place(member.offset_data, member.size)
                for member in tar
                if member.isreg() and not member.issparse()
            }
    except tarfile.TarError as error:
        raise OSError(str(error)) from error


def plain_name(name: str) -> str:
    """Return a member's name without the ``./`` that ``tar cf SHARD.tar .`` adds."""
    return name.removeprefix("./")
