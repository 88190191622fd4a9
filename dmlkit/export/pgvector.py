"""Embeddings as a table of PostgreSQL with pgvector."""

import os
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np

from dmlkit.embedding.folder import EmbeddingFolder
from dmlkit.errors import UserError
from dmlkit.export.store import Destination, StoreIndex, StoreRows, rows_of, store_manifest, without_password

SCHEMES = ("postgresql://", "postgres://")
LONGEST_NAME = 63  # bytes; PostgreSQL would cut a longer one without an error
MOST_INDEXED = 2000  # coordinates that an index of pgvector takes in float32
MOST_HALVED = 4000  # likewise in float16
TIMEOUT = 10  # seconds in which a server must answer, where PGCONNECT_TIMEOUT and the address say nothing


def write_pgvector(folder: EmbeddingFolder, to: Destination) -> list[str]:
    """A table with the columns ``id path label vector`` and an HNSW index, in one transaction, by COPY.

    Args:
        folder: the embeddings.
        to: a ``postgresql://`` address; what it leaves out, the password too, libpq takes from the PG* variables of the
            environment and from ~/.pgpass.

    Returns:
        What to know of the index.

    Raises:
        UserError: the server does not answer, has no pgvector, or has such a table already.
    """
    if not to.target.startswith(SCHEMES):
        raise UserError("--format pgvector: name the database with --output postgresql://USER@HOST/DATABASE")
    without_password(to.target)  # refuses what cannot be shown before anything tells of it
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
            # bytes are sent as they are, and the server reads them as a vector
            stream.set_types(["int8", "text", "text", "bytea"])
            for rows in rows_of(folder, manifest.index, to.bar):
                for row in _encoded(rows):
                    stream.write_row(row)
        comment = sql.SQL("COMMENT ON TABLE {} IS {}")
        cursor.execute(comment.format(sql.Identifier(to.table), sql.Literal(manifest.text())))
        return _index(cursor, to.table, manifest.index)


def _connect(address: str) -> Any:
    """A connection whose transaction is committed at the end of its block, and taken back at an error."""
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
        told = str(error).splitlines()[0]
        raise UserError(
            f"{without_password(to.target)}: this database has no pgvector: {told}; install it on the server, and let its "
            "administrator run CREATE EXTENSION vector"
        ) from error


def _make_room(cursor: Any, to: Destination) -> None:
    """Drop the table that is to be replaced: other sessions see it until the transaction ends.

    Raises:
        UserError: it may not be replaced.
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
    """Rows as COPY takes them: a vector is its length, two bytes for later use, and big-endian floats."""
    ids, paths, labels = (rows.items[name].to_pylist() for name in ("id", "path", "label"))
    header = struct.pack(">hh", rows.vectors.shape[1], 0)
    vectors = (header + vector.tobytes() for vector in rows.vectors.astype(np.dtype(">f4")))
    return zip(ids, paths, labels, vectors, strict=True)


def _index(cursor: Any, table: str, index: StoreIndex) -> list[str]:
    """An HNSW index with the operator class of the distance; of wide vectors over their halves."""
    from psycopg import sql

    whole = "every search reads the whole table"
    if not index.suits_graph():
        return [f"no index: HNSW would lose neighbours of hyperbolic vectors; {whole}, which is exact"]
    has_halves = cursor.execute("SELECT to_regtype('halfvec')").fetchone()[0] is not None
    operators = {"cosine": "cosine_ops", "l2": "l2_ops", "dot": "ip_ops"}[index.distance]
    if index.dim <= MOST_INDEXED:
        column, kind = sql.SQL("vector"), "vector"
    elif index.dim <= MOST_HALVED and has_halves:
        column, kind = sql.SQL("(vector::halfvec({}))").format(sql.Literal(index.dim)), "halfvec"
    else:
        why = f"pgvector indexes at most {MOST_HALVED if has_halves else MOST_INDEXED} coordinates"
        return [f"no index: {why}, these have {index.dim}; {whole}"]
    statement = sql.SQL("CREATE INDEX ON {} USING hnsw ({} {})")
    cursor.execute(statement.format(sql.Identifier(table), column, sql.Identifier(f"{kind}_{operators}")))
    told = f"HNSW index: {kind}_{operators}"
    return [told if kind == "vector" else f"{told} over float16; order by vector::halfvec({index.dim}) to use it"]
