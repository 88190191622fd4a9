"""Export of embeddings as a table of PostgreSQL with pgvector."""

import os
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np

from dmlkit.embedding.folder import EmbeddingFolder
from dmlkit.errors import UserError, first_line
from dmlkit.export.store import Destination, StoreIndex, StoreRows, rows_of, store_manifest, without_password

SCHEMES = ("postgresql://", "postgres://")
LONGEST_NAME = 63  # bytes; PostgreSQL would truncate a longer name without an error
MOST_INDEXED = 2000  # largest dimension of a pgvector index in float32
MOST_HALVED = 4000  # the same in float16
TIMEOUT = 10  # seconds to connect, unless PGCONNECT_TIMEOUT or the address sets another time


def write_pgvector(folder: EmbeddingFolder, to: Destination) -> list[str]:
    """Write a table with the columns ``id path label vector`` and an HNSW index in one transaction; return notes on it.

    Args:
        to: a ``postgresql://`` address. Parts that it omits, including the password, are read by libpq from the PG*
            environment variables and from ~/.pgpass.

    Raises:
        UserError: the server does not answer, has no pgvector, or the table already exists.
    """
    if not to.target.startswith(SCHEMES):
        raise UserError("--format pgvector: expected --output postgresql://USER@HOST/DATABASE")
    without_password(to.target)  # rejects an address whose password cannot be removed, before any message shows it
    if not 0 < len(to.table.encode()) <= LONGEST_NAME or "\0" in to.table:
        raise UserError(f"--table {to.table!r}: expected a name of 1 to {LONGEST_NAME} bytes")
    try:
        import psycopg
        from psycopg import sql
    except ImportError:
        raise UserError("--format pgvector needs psycopg; install it with: pip install 'dmlkit[pgvector]'") from None
    manifest = store_manifest(folder)
    with to.writing(psycopg.Error), _connect(to.target) as connection, connection.cursor() as cursor:
        _need_pgvector(cursor, to)
        _make_room(cursor, to)
        _create(cursor, to.table, manifest.index.dim)
        copy = sql.SQL("COPY {} (id, path, label, vector) FROM STDIN (FORMAT BINARY)")
        with cursor.copy(copy.format(sql.Identifier(to.table))) as stream:
            # bytes are sent unchanged, and the server reads them as a vector
            stream.set_types(["int8", "text", "text", "bytea"])
            for rows in rows_of(folder, manifest.index, to.bar):
                for row in _encoded(rows):
                    stream.write_row(row)
        comment = sql.SQL("COMMENT ON TABLE {} IS {}")
        cursor.execute(comment.format(sql.Identifier(to.table), sql.Literal(manifest.text())))
        return _index(cursor, to.table, manifest.index)


def _connect(address: str) -> Any:
    """Return a connection whose transaction is committed at the end of its block, and rolled back after an error."""
    import psycopg
    from psycopg.conninfo import conninfo_to_dict

    timeout: Any = os.environ.get("PGCONNECT_TIMEOUT", TIMEOUT)
    return psycopg.connect(address, connect_timeout=conninfo_to_dict(address).get("connect_timeout", timeout))


def _need_pgvector(cursor: Any, to: Destination) -> None:
    import psycopg

    if cursor.execute("SELECT 1 FROM pg_extension WHERE extname = 'vector'").fetchone():
        return
    try:
        cursor.execute("CREATE EXTENSION vector")
    except psycopg.Error as error:
        message = first_line(error)
        raise UserError(
            f"{without_password(to.target)}: this database has no pgvector ({message}); install it on the server, and "
            "let its administrator run CREATE EXTENSION vector"
        ) from error


def _make_room(cursor: Any, to: Destination) -> None:
    """Drop the table to replace; other sessions see it until the transaction ends.

    Raises:
        UserError: the table may not be replaced.
    """
    from psycopg import sql

    name = sql.Identifier(to.table)
    quoted = name.as_string(cursor)
    (oid,) = cursor.execute("SELECT to_regclass(%s)::oid", [quoted]).fetchone()
    if oid is None:
        return
    (comment,) = cursor.execute("SELECT obj_description(%s, 'pg_class')", [oid]).fetchone()
    to.check_replaceable(comment)
    cursor.execute(sql.SQL("DROP TABLE {}").format(name))


def _create(cursor: Any, table: str, dim: int) -> None:
    from psycopg import sql

    statement = sql.SQL(
        "CREATE TABLE {} (id bigint PRIMARY KEY, path text NOT NULL, label text, vector vector({}) NOT NULL)"
    )
    cursor.execute(statement.format(sql.Identifier(table), sql.Literal(dim)))


def _encoded(rows: StoreRows) -> Iterator[tuple[int, str, str | None, bytes]]:
    """Yield rows for binary COPY: a vector is its length, two reserved bytes, and big-endian floats."""
    ids, paths, labels = (rows.items[name].to_pylist() for name in ("id", "path", "label"))
    header = struct.pack(">hh", rows.vectors.shape[1], 0)
    vectors = (header + vector.tobytes() for vector in rows.vectors.astype(np.dtype(">f4")))
    return zip(ids, paths, labels, vectors, strict=True)


def _index(cursor: Any, table: str, index: StoreIndex) -> list[str]:
    """Create an HNSW index with the operator class of the distance, for wide vectors over their float16 values."""
    from psycopg import sql

    full_scan = "every search reads the full table"
    if not index.suits_graph():
        return [f"no index: HNSW would miss neighbors of hyperbolic vectors; {full_scan}, which is exact"]
    has_halves = cursor.execute("SELECT to_regtype('halfvec')").fetchone()[0] is not None
    operators = {"cosine": "cosine_ops", "l2": "l2_ops", "dot": "ip_ops"}[index.distance]
    if index.dim <= MOST_INDEXED:
        column, kind = sql.SQL("vector"), "vector"
    elif index.dim <= MOST_HALVED and has_halves:
        column, kind = sql.SQL("(vector::halfvec({}))").format(sql.Literal(index.dim)), "halfvec"
    else:
        limit = MOST_HALVED if has_halves else MOST_INDEXED
        return [f"no index: these vectors have {index.dim} dimensions, pgvector indexes at most {limit}; {full_scan}"]
    statement = sql.SQL("CREATE INDEX ON {} USING hnsw ({} {})")
    cursor.execute(statement.format(sql.Identifier(table), column, sql.Identifier(f"{kind}_{operators}")))
    note = f"HNSW index: {kind}_{operators}"
    return [note if kind == "vector" else f"{note} over float16; order by vector::halfvec({index.dim}) to use it"]
