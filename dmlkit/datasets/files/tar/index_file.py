"""Index of shards: a Parquet file with the place of each image, so that tar files are scanned only once.

The file's metadata contain a document with the size and modification time of each shard. Each shard is a row group, so
that its images are found without reading the other rows.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from dmlkit.datasets.files.tar.reading import Stamp
from dmlkit.errors import UserError
from dmlkit.files.atomic import atomic_write
from dmlkit.files.document import Document
from dmlkit.files.outputs import writing
from dmlkit.files.regular import refuse_what_is_no_file

INDEX = "shards.parquet"
"""Name of the index file, in the folder of the shards or of their splits."""
KEY = b"dmlkit"
TEXTS = ("label", "query", "gallery", "super_class", "group")
BOX = ("x1", "y1", "x2", "y2")
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


def read_index(path: Path) -> tuple[ShardIndex, Any]:
    """Read the document and the rows of an index; the rows are a pyarrow table.

    Raises:
        UserError: the file is missing, damaged, or not an index by dmlkit.
    """
    return _read(path, None)


def read_index_of(path: Path, shard: str) -> tuple[ShardIndex, Any]:
    """Read an index like `read_index`, with only the rows of one shard."""
    return _read(path, [("shard", "==", shard)])


def _read(path: Path, filters: Any) -> tuple[ShardIndex, Any]:
    from pyarrow import ArrowException, parquet

    again = "remove it so that it is written again, or set dataset.index to another file"
    refuse_what_is_no_file(path)
    try:
        table: Any = parquet.read_table(path, filters=filters, page_checksum_verification=True)
    except (OSError, ArrowException) as error:
        raise UserError(f"{path}: cannot read this index of shards: {str(error).splitlines()[0]}; {again}") from error
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
