"""Export of embeddings as a table of LanceDB."""

from collections.abc import Iterator
from typing import Any

from dmlkit.embedding.folder import EmbeddingFolder
from dmlkit.embedding.gallery.table import lancedb
from dmlkit.export.store import Destination, rows_of, store_manifest

MARK = b"dmlkit"  # key of the manifest in the schema's metadata


def write_lancedb(folder: EmbeddingFolder, to: Destination) -> list[str]:
    """Write a table with the columns ``id path label vector`` in one commit.

    Args:
        to: a folder for the database, or an address that LanceDB supports, such as ``s3://``.

    Raises:
        UserError: the table already exists or cannot be written.
    """
    import pyarrow as pa

    manifest, database = store_manifest(folder), lancedb()
    schema = pa.schema(
        [
            pa.field("id", pa.int64(), nullable=False),
            pa.field("path", pa.string(), nullable=False),
            pa.field("label", pa.string()),
            pa.field("vector", pa.list_(pa.float32(), manifest.index.dim), nullable=False),
        ],
        {MARK: manifest.text()},
    )

    def batches() -> Iterator[Any]:
        for items, vectors in rows_of(folder, manifest.index, to.bar):
            column = pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), vectors.shape[1])
            table = items.append_column(schema.field("vector"), column).cast(schema)
            yield from table.combine_chunks().to_batches()

    for _ in rows_of(folder, manifest.index):
        pass  # reports an invalid row here; LanceDB would raise an error of its own
    with to.writing(ValueError, RuntimeError, OSError):
        connection = database.connect(to.target)
        found = _manifest_in(connection, to.table)
        if found is not None:
            to.check_replaceable(found)
        mode = "create" if found is None else "overwrite"
        connection.create_table(to.table, pa.RecordBatchReader.from_batches(schema, batches()), mode=mode)
    return []


def _manifest_in(connection: Any, table: str) -> str | None:
    """Return the manifest of a table; empty if dmlkit did not write the table, None if there is no such table."""
    try:
        metadata = connection.open_table(table).schema.metadata or {}
    except ValueError as error:  # raised also for a table whose creation was killed
        if "was not found" in str(error):
            return None
        raise
    return metadata.get(MARK, b"").decode()
