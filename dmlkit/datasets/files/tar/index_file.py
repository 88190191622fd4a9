"""The index of shards: a Parquet file that says where each image lies, so that tar files are gone through once.

Its metadata hold a document with the size and time of each shard, and each shard is a row group: the images of one are
found without reading the others.
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
"""Its name, in the folder of the shards or of their splits."""
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
"""With their types in Arrow's words. A row is an image of a shard, or what is wrong with one."""


class ShardIndex(Document, frozen=True, strict=True):
    """What an index is of."""

    kind: ClassVar[str] = "index of shards"

    shards: dict[str, Stamp]
    """By name, relative to the root: bytes, and time of change in nanoseconds."""


def read_index(path: Path) -> tuple[ShardIndex, Any]:
    """What an index is of, and its rows, a pyarrow table.

    Raises:
        UserError: it is missing, damaged, or none of dmlkit's.
    """
    return _read(path, None)


def read_index_of(path: Path, shard: str) -> tuple[ShardIndex, Any]:
    """As `read_index`, with the rows of one shard."""
    return _read(path, [("shard", "==", shard)])


def _read(path: Path, filters: Any) -> tuple[ShardIndex, Any]:
    from pyarrow import ArrowException, parquet

    again = "remove it, and it is written anew, or name another file by dataset.index"
    refuse_what_is_no_file(path)
    try:
        table: Any = parquet.read_table(path, filters=filters, page_checksum_verification=True)
    except (OSError, ArrowException) as error:
        raise UserError(f"{path}: cannot read this index of shards: {str(error).splitlines()[0]}; {again}") from error
    written = (table.schema.metadata or {}).get(KEY)
    kinds = {name: str(table.schema.field(name).type) for name in table.column_names}
    if written is None or kinds != COLUMNS:
        raise UserError(f"{path}: is no index of shards that dmlkit wrote; {again}")
    try:
        return ShardIndex.from_json(written.decode(), str(path)), table
    except UserError as error:
        raise UserError(f"{error}; {again}") from error


def write_index(path: Path, stamps: dict[str, Stamp], tables: Iterable[Any]) -> None:
    """Write an index, all or nothing: a row group for each table, which has the images of one shard.

    Raises:
        UserError: it cannot be written.
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
    """The columns of an index in Arrow."""
    import pyarrow as pa

    return pa.schema([(name, pa.type_for_alias(kind)) for name, kind in COLUMNS.items()])


def arrow_table(rows: Sequence[dict[str, Any]]) -> Any:
    """Rows of an index as a pyarrow table; what a row does not say is null."""
    import pyarrow as pa

    return pa.Table.from_pylist(list(rows), schema=arrow_schema())
