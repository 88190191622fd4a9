"""Export of embeddings as a table of LanceDB, a table of PostgreSQL with pgvector, or a collection of Qdrant."""

import json
import os
import shutil
import struct
import warnings
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from dmlkit.errors import UserError, first_line
from dmlkit.export.store import (
    Destination,
    StoreIndex,
    StoreManifest,
    StoreRows,
    is_address,
    rows_of,
    store_manifest,
    without_password,
)
from dmlkit.files.outputs import check_folder
from dmlkit.vectors.folder import EmbeddingFolder
from dmlkit.vectors.progress_bar import Bar

SCHEMA_KEY = b"dmlkit"  # of the manifest in the metadata of a table's schema


def write_lancedb(folder: EmbeddingFolder, to: Destination) -> list[str]:
    """Write a table with the columns ``id path label vector`` in one commit.

    Args:
        to: a folder for the database, or an address that LanceDB supports, such as ``s3://``.

    Raises:
        UserError: the folder has other files, or the table already exists or cannot be written.
    """
    import pyarrow as pa

    if not is_address(to.target):
        check_folder(Path(to.target), "a LanceDB database", "*.lance")
    manifest, database = store_manifest(folder), _lancedb()
    schema = pa.schema(
        [
            pa.field("id", pa.int64(), nullable=False),
            pa.field("path", pa.string(), nullable=False),
            pa.field("label", pa.string()),
            pa.field("vector", pa.list_(pa.float32(), manifest.index.dim), nullable=False),
        ],
        {SCHEMA_KEY: manifest.text()},
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
    return metadata.get(SCHEMA_KEY, b"").decode()


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
        raise UserError(
            f"{without_password(to.target)}: this database has no pgvector ({first_line(error)}); install it on the "
            "server, and let its administrator run CREATE EXTENSION vector"
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


COLLECTION_KEY = "dmlkit"  # of the manifest in a collection's metadata
SENT = 256  # points per request: 3 MB of JSON at 512 dimensions; a server accepts 32 MB
KEY = "QDRANT_API_KEY"
FILES = {".lock", "meta.json", "collection"}  # files of the local mode


def write_qdrant(folder: EmbeddingFolder, to: Destination) -> list[str]:
    """Write a collection of points with the payload ``path label``, behind an alias that is set after all points.

    A search therefore sees the complete collection or the previous one. The next export removes collections that a
    killed export left.

    Args:
        to: a folder for Qdrant's local mode, or the URL of a server, whose key is read from QDRANT_API_KEY.

    Raises:
        UserError: the server does not answer, or the collection already exists.
    """
    try:
        from qdrant_client import models
        from qdrant_client.common.client_exceptions import QdrantException
        from qdrant_client.http.exceptions import ApiException
    except ImportError:
        raise UserError("--format qdrant needs qdrant-client; install it with: pip install 'dmlkit[qdrant]'") from None
    manifest = store_manifest(folder)
    with to.writing(ApiException, QdrantException, ValueError, RuntimeError, OSError), _whole_folder(to):
        client = _client(to)
        try:
            before, abandoned = _collections_of(client, to)
            name = f"{to.table}-{uuid4().hex[:12]}"
            try:
                _fill(client, name, folder, manifest, to.bar)
                alias = models.CreateAlias(collection_name=name, alias_name=to.table)
                changes: list[Any] = [models.CreateAliasOperation(create_alias=alias)]
                if before is not None:
                    gone = models.DeleteAlias(alias_name=to.table)
                    changes.insert(0, models.DeleteAliasOperation(delete_alias=gone))
                client.update_collection_aliases(changes)
            except BaseException:
                client.delete_collection(name)
                raise
            for old in (before, *abandoned):
                if old is not None:
                    client.delete_collection(old)
        finally:
            client.close()
    return [f"{to.table} is an alias of the collection {name}"]


@contextmanager
def _whole_folder(to: Destination) -> Generator[None]:
    """Remove a new folder when the export fails: on a full disk Qdrant leaves a folder that it cannot read."""
    folder = Path(to.target)
    is_new = not is_address(to.target) and not folder.exists()
    try:
        yield
    except BaseException:
        if is_new:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _client(to: Destination) -> Any:
    from qdrant_client import QdrantClient

    if is_address(to.target):
        return QdrantClient(url=to.target, api_key=os.environ.get(KEY), check_compatibility=False)
    folder = Path(to.target)
    if folder.exists() and not (folder.is_dir() and _is_qdrants(folder)):
        raise UserError(f"--output {folder}: already exists and is not a folder of Qdrant; choose another --output")
    return QdrantClient(path=to.target)


def _is_qdrants(folder: Path) -> bool:
    """Return whether Qdrant may write into a folder: it is empty, or Qdrant wrote its files."""
    names = {entry.name for entry in folder.iterdir()}
    if not names <= FILES:
        return False
    if "meta.json" not in names:
        return True
    try:
        return "collections" in json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    except ValueError:
        return False


def _collections_of(client: Any, to: Destination) -> tuple[str | None, list[str]]:
    """Return the collection behind the alias, and the collections that killed exports left.

    Raises:
        UserError: the collection may not be replaced.
    """
    names = [found.name for found in client.get_collections().collections]
    if to.table in names:
        to.check_replaceable(None)
    targets = {found.alias_name: found.collection_name for found in client.get_aliases().aliases}
    before = targets.get(to.table)
    if before is not None:
        to.check_replaceable(_manifest_of(client, before))
    ours = [name for name in names if name.startswith(f"{to.table}-") and _manifest_of(client, name)]
    return before, [name for name in ours if name not in targets.values()]


def _manifest_of(client: Any, collection: str) -> str:
    return (client.get_collection(collection).config.metadata or {}).get(COLLECTION_KEY, "")


def _fill(client: Any, name: str, folder: EmbeddingFolder, manifest: StoreManifest, bar: Bar) -> None:
    from qdrant_client import models

    distances = {"cosine": models.Distance.COSINE, "l2": models.Distance.EUCLID, "dot": models.Distance.DOT}
    described = models.VectorParams(
        size=manifest.index.dim,
        distance=distances[manifest.index.distance],
        hnsw_config=None if manifest.index.suits_graph() else models.HnswConfigDiff(m=0),  # 0: no graph
    )
    client.create_collection(name, vectors_config=described, metadata={COLLECTION_KEY: manifest.text()})
    for items, vectors in rows_of(folder, manifest.index, bar):
        ids, payloads = items["id"].to_pylist(), items.select(["path", "label"]).to_pylist()
        for start in range(0, len(ids), SENT):
            sent = slice(start, start + SENT)
            batch = models.Batch(ids=ids[sent], vectors=vectors[sent].tolist(), payloads=payloads[sent])
            client.upsert(name, points=batch, wait=True)


def _lancedb() -> Any:
    """Return the package ``lancedb``.

    Raises:
        UserError: it is not installed.
    """
    os.environ.setdefault("LANCEDB_LOG", "error")  # it warns of its own defaults
    # loader processes are forked after it is imported; they decode images and never call it
    warnings.filterwarnings("ignore", message="lancedb fork support")
    try:
        import lancedb
    except ModuleNotFoundError:
        raise UserError("this needs LanceDB; install it with: pip install 'dmlkit[lancedb]'") from None
    return lancedb
