"""Export embeddings into other people's stores, by name."""

from pathlib import Path
from typing import Literal

from dmlkit.embedding.folder import EmbeddingFolder
from dmlkit.embedding.in_memory import Bar, no_bar
from dmlkit.export.address import is_address
from dmlkit.export.lancedb import write_lancedb
from dmlkit.export.pgvector import write_pgvector
from dmlkit.export.qdrant import write_qdrant
from dmlkit.export.store import Destination

StoreFormat = Literal["lancedb", "qdrant", "pgvector"]
TABLE = "embeddings"  # where nothing is said


def export_to_store(
    folder: EmbeddingFolder,
    format: StoreFormat,  # noqa: A002
    target: str | None,
    table: str | None,
    *,
    overwrite: bool = False,
    bar: Bar = no_bar,
) -> tuple[Destination, list[str]]:
    """Write embeddings with their ids, paths and labels as a table, whole or not at all.

    Args:
        folder: the embeddings.
        format: ``lancedb``, ``qdrant`` (a collection) or ``pgvector``.
        target: a folder, or the address of a server; by default a folder of the format's name in the source.
        table: its name, by default `TABLE`.
        overwrite: replace the table, if this command has written it.
        bar: shows the rows.

    Returns:
        Where the table is, and what to know of it.

    Raises:
        UserError: an embedding is no point of its manifold, or a table is there already, or the store refuses to write.
    """
    folder.check_points()  # of a faulty one nothing is written
    write = {"lancedb": write_lancedb, "qdrant": write_qdrant, "pgvector": write_pgvector}
    if target is None or not is_address(target):
        target = str(folder.path / format if target is None else Path(target))
    to = Destination(target, TABLE if table is None else table, overwrite, bar)
    return to, write[format](folder, to)
