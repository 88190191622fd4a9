"""Export of embeddings to databases: a table of LanceDB, a table of PostgreSQL with pgvector, a collection of Qdrant.

Each writer sends id, path and label of the rows of the Parquet table of items, with the vectors that the database
compares; boxes are left out.
"""

import os
import re
import shutil
import warnings
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal
from urllib.parse import urlsplit
from uuid import uuid4

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import PositiveInt

from dmlkit.errors import UserError, first_line
from dmlkit.files.outputs import check_folder
from dmlkit.vectors.folder import EmbeddingFolder
from dmlkit.vectors.index_vectors import Vectors, index_vectors
from dmlkit.vectors.manifest import Manifest, SearchIndex
from dmlkit.vectors.progress_bar import Bar, no_bar

ROWS = 4096  # rows per block: 8 MB at 512 dimensions
MANIFEST = "dmlkit"  # key of the manifest in the metadata of a table or collection
StoreDistance = Literal["cosine", "l2", "dot"]


class StoreIndex(SearchIndex, frozen=True, extra="forbid", strict=True):
    """Vectors in a store, and the distance function that gives them the order of the similarity."""

    order: str = "the vectors that are nearest to that of a query, by the distance function, are the most similar"
    """How the store orders vectors."""
    distance: StoreDistance
    """The store's distance function; with ``dot`` the largest products are the nearest."""
    dim: PositiveInt
    """Dimension of a vector; on some manifolds not that of an embedding."""

    def suits_graph(self) -> bool:
        """Return whether a graph index such as HNSW finds the nearest vectors.

        Such an index walks between near vectors of the gallery, but lifted gallery vectors have the right order only
        for a lifted query: HNSW found 6 % of the 5 nearest of 5 000 points in a ball.
        """
        return self.form in ("as_is", "unit", "unit_space")


class StoreManifest(Manifest, frozen=True, strict=True):
    """Manifest of a table in a store: the manifest of its embeddings, and how they are searched there."""

    kind: ClassVar[str] = "manifest of a table of embeddings"

    index: StoreIndex  # pyright: ignore[reportGeneralTypeIssues] - unlike its parent's it has no default
    """How the table is searched."""


@dataclass(frozen=True)
class Destination:
    """Destination of a table."""

    target: str  # a folder or an address
    table: str
    overwrite: bool = False  # replace a table of this name if dmlkit wrote it
    bar: Bar = no_bar  # shows the rows that are written

    def __str__(self) -> str:
        shown = without_password(self.target) if is_address(self.target) else self.target
        return f"{shown}: table {self.table!r}"

    def check_replaceable(self, manifest: str | None) -> None:
        """Raise unless ``overwrite`` is set and the text of an existing table's manifest shows that dmlkit wrote it."""
        if not self.overwrite:
            raise UserError(f"{self} already exists; replace it with --overwrite, or choose another --table")
        try:
            StoreManifest.from_json(manifest or "", str(self))
        except UserError:
            raise UserError(
                f"{self} already exists and was not written by dmlkit export; remove it, or choose another --table"
            ) from None

    @contextmanager
    def writing(self, *errors: type[Exception]) -> Generator[None]:
        """Convert the errors of a store into a `UserError`."""
        try:
            yield
        except errors as error:
            raise UserError(f"{self} cannot be written: {first_line(error)}") from error


def store_manifest(folder: EmbeddingFolder) -> StoreManifest:
    """Return the manifest of a table of embeddings."""
    manifest, form = folder.manifest, folder.manifest.index.form
    if not len(folder):
        raise UserError(f"{folder.path}: there are no embeddings to export")
    distance: StoreDistance
    match form:  # a distance other than cosine, dot and L2 needs a lift
        case "as_is":  # unit vectors, or a dot product
            distances: dict[str, StoreDistance] = {"dot": "dot", "cosine": "cosine"}
            distance = distances.get(manifest.similarity, "l2")
        case "unit":
            distance, form = "cosine", "as_is"
        case "unit_space":
            distance = "cosine"
        case "euclidean_lift":
            distance, form = "l2", "as_is"
        case _:
            distance = "dot"
    search: dict[str, Any] = {"form": form, "curvature": manifest.index.curvature}
    dim = _vectors(folder, torch.from_numpy(np.array(folder.points[:1])), search).shape[1]
    index = StoreIndex(**search, distance=distance, dim=dim)
    # checksums of the embeddings are of other files
    fields: dict[str, Any] = {**dict(manifest), "index": index, "checksums": None}
    return StoreManifest(**fields)


def rows_of(folder: EmbeddingFolder, index: StoreIndex, bar: Bar = no_bar) -> Iterator[tuple[Any, NDArray[np.float32]]]:
    """Yield blocks of rows: an Arrow table with the columns id, path and label, and vectors (n, D') float32."""
    start, items = 0, folder.items.select(["id", "path", "label"])
    with bar("exporting", len(folder)) as advance:
        for block in folder.blocks(ROWS):
            vectors = _vectors(folder, block, index.model_dump()).astype(np.float32)
            is_zero = ~vectors.any(1)
            if index.distance == "cosine" and is_zero.any():
                folder.refuse_row(start + int(is_zero.argmax()), "its vector is zero, which has no cosine")
            yield items.slice(start, len(block)), vectors
            start += len(block)
            advance(len(block))


def _vectors(folder: EmbeddingFolder, points: torch.Tensor, search: dict[str, Any]) -> Vectors:
    if search["form"] == "own":
        return folder.manifold.index_vectors(points.double(), "gallery").detach().numpy()
    return index_vectors(points.numpy(), search, "gallery")


def is_address(target: str) -> bool:
    """Return whether a text is an address and not a path."""
    return "://" in target


def without_password(address: str) -> str:
    """Return an address without its password and without its options, which may contain one.

    Example:
        >>> without_password("postgresql://me:secret@db:5433/birds?sslmode=require")
        'postgresql://me@db:5433/birds'
    """
    try:
        parts = urlsplit(address)
        port = "" if parts.port is None else f":{parts.port}"  # not a number: it may be the start of a password
        if parts.netloc.count("@") > 1 or any("@" in part for part in (parts.path, parts.query, parts.fragment)):
            raise ValueError
    except ValueError:
        scheme = address.partition("://")[0]
        raise UserError(
            f"--output {scheme}://...: cannot read this address; expected {scheme}://USER:PASSWORD@HOST:PORT/NAME, "
            "where a password has %40 for @, %3A for :, %2F for /, %3F for ? and %23 for #"
        ) from None
    user = f"{parts.username}@" if parts.username else ""
    return f"{parts.scheme}://{user}{parts.hostname or ''}{port}{parts.path}"


def write_lancedb(folder: EmbeddingFolder, to: Destination) -> list[str]:
    """Write a table ``id path label vector`` in one commit, to a folder or an address of LanceDB such as ``s3://``."""
    import pyarrow as pa

    os.environ.setdefault("LANCEDB_LOG", "error")  # it warns of its own defaults
    # loader processes are forked after it is imported; they decode images and never call it
    warnings.filterwarnings("ignore", message="lancedb fork support")
    try:
        import lancedb
    except ModuleNotFoundError:
        raise UserError("--format lancedb needs LanceDB; install it with: pip install 'dmlkit[lancedb]'") from None
    if not is_address(to.target):
        check_folder(Path(to.target), "a LanceDB database", "*.lance")
    manifest = store_manifest(folder)
    fields = [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("path", pa.string(), nullable=False),
        pa.field("label", pa.string()),
        pa.field("vector", pa.list_(pa.float32(), manifest.index.dim), nullable=False),
    ]
    schema = pa.schema(fields, {MANIFEST.encode(): manifest.text()})

    def batches() -> Iterator[Any]:
        for items, vectors in rows_of(folder, manifest.index, to.bar):
            column = pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), vectors.shape[1])
            table = items.append_column(schema.field("vector"), column).cast(schema)
            yield from table.combine_chunks().to_batches()

    for _ in rows_of(folder, manifest.index):
        pass  # reports an invalid row here; LanceDB would raise an error of its own
    with to.writing(ValueError, RuntimeError, OSError):
        connection: Any = lancedb.connect(to.target)
        mode = "create"
        try:
            metadata = connection.open_table(to.table).schema.metadata or {}
        except ValueError as error:  # raised also for a table whose creation was killed
            if "was not found" not in str(error):
                raise
        else:
            mode = "overwrite"
            to.check_replaceable(metadata.get(MANIFEST.encode(), b"").decode())
        connection.create_table(to.table, pa.RecordBatchReader.from_batches(schema, batches()), mode=mode)
    return []


LONGEST_NAME = 63  # bytes; PostgreSQL would truncate a longer name without an error
MOST_INDEXED = 2000  # largest dimension of a pgvector index in float32
MOST_HALVED = 4000  # the same in float16


def write_pgvector(folder: EmbeddingFolder, to: Destination) -> list[str]:
    """Write a table with the columns ``id path label vector`` and an HNSW index in one transaction; return notes on it.

    Parts that the ``postgresql://`` address omits, including the password, are read by libpq from the PG* environment
    variables and from ~/.pgpass.
    """
    if not to.target.startswith(("postgresql://", "postgres://")):
        raise UserError("--format pgvector: expected --output postgresql://USER@HOST/DATABASE")
    without_password(to.target)  # rejects an address whose password cannot be removed, before any message shows it
    if not 0 < len(to.table.encode()) <= LONGEST_NAME or "\0" in to.table:
        raise UserError(f"--table {to.table!r}: expected a name of 1 to {LONGEST_NAME} bytes")
    try:
        import psycopg
        from psycopg import sql
    except ImportError:
        raise UserError("--format pgvector needs psycopg; install it with: pip install 'dmlkit[pgvector]'") from None
    manifest, name = store_manifest(folder), sql.Identifier(to.table)
    os.environ.setdefault("PGCONNECT_TIMEOUT", "10")  # seconds, unless the address sets another time
    with to.writing(psycopg.Error), psycopg.connect(to.target) as connection, connection.cursor() as opened:
        cursor: Any = opened
        cursor.execute("CREATE EXTENSION IF NOT EXISTS vector")
        quoted = name.as_string(cursor)
        exists, comment = cursor.execute(
            "SELECT to_regclass(%s) IS NOT NULL, obj_description(to_regclass(%s), 'pg_class')", [quoted, quoted]
        ).fetchone()
        if exists:
            to.check_replaceable(comment)
            cursor.execute(sql.SQL("DROP TABLE {}").format(name))  # others see it until the transaction ends
        create = "CREATE TABLE {} (id bigint PRIMARY KEY, path text NOT NULL, label text, vector vector({}) NOT NULL)"
        cursor.execute(sql.SQL(create).format(name, sql.Literal(manifest.index.dim)))
        with cursor.copy(sql.SQL("COPY {} (id, path, label, vector) FROM STDIN").format(name)) as stream:
            for items, vectors in rows_of(folder, manifest.index, to.bar):
                for row, vector in zip(items.to_pylist(), vectors.tolist(), strict=True):
                    stream.write_row((*row.values(), str(vector)))
        cursor.execute(sql.SQL("COMMENT ON TABLE {} IS {}").format(name, sql.Literal(manifest.text())))
        return _create_index(cursor, name, manifest.index)


def _create_index(cursor: Any, table: Any, index: StoreIndex) -> list[str]:
    """Create an HNSW index with the operator class of the distance, for wide vectors over their float16 values."""
    from psycopg import sql

    full_scan = "every search reads the full table"
    if not index.suits_graph():
        return [f"no index: HNSW would miss neighbors of hyperbolic vectors; {full_scan}, which is exact"]
    if index.dim > MOST_HALVED:
        limit = f"these vectors have {index.dim} dimensions, pgvector indexes at most {MOST_HALVED}"
        return [f"no index: {limit}; {full_scan}"]
    is_wide = index.dim > MOST_INDEXED
    column = sql.SQL("(vector::halfvec({}))").format(sql.Literal(index.dim)) if is_wide else sql.SQL("vector")
    operators = {"cosine": "cosine_ops", "l2": "l2_ops", "dot": "ip_ops"}[index.distance]
    operators = f"{'halfvec' if is_wide else 'vector'}_{operators}"
    cursor.execute(sql.SQL("CREATE INDEX ON {} USING hnsw ({} {})").format(table, column, sql.Identifier(operators)))
    way = f" over float16; order by vector::halfvec({index.dim}) to use it" if is_wide else ""
    return [f"HNSW index: {operators}{way}"]


SENT = 256  # points per request: 3 MB of JSON at 512 dimensions; a server accepts 32 MB


def write_qdrant(folder: EmbeddingFolder, to: Destination) -> list[str]:
    """Write a collection of points with the payload ``path label``, behind an alias that is set after all points.

    A search therefore sees the complete collection or the previous one. The next export removes collections that a
    killed export left. The target is a folder for Qdrant's local mode, or the URL of a server, whose key is read from
    QDRANT_API_KEY.
    """
    try:
        from qdrant_client import QdrantClient
        from qdrant_client.common.client_exceptions import QdrantException
        from qdrant_client.http.exceptions import ApiException
    except ImportError:
        raise UserError("--format qdrant needs qdrant-client; install it with: pip install 'dmlkit[qdrant]'") from None
    if not to.table:  # the local mode would take it
        raise UserError("--table '': expected the name of a collection")
    manifest = store_manifest(folder)
    local = None if is_address(to.target) else Path(to.target)
    if local:
        check_folder(local, "a collection of Qdrant", "meta.json")
    location: dict[str, Any] = {"path": to.target}
    if local is None:
        location = {"url": to.target, "api_key": os.environ.get("QDRANT_API_KEY"), "check_compatibility": False}
    is_new = local is not None and not local.exists()
    with to.writing(ApiException, QdrantException, ValueError, KeyError, RuntimeError, OSError):
        try:
            with closing(QdrantClient(**location)) as client:
                name = _replace_collection(client, folder, manifest, to)
        except BaseException:
            if local and is_new:  # on a full disk Qdrant leaves a folder that it cannot read
                shutil.rmtree(local, ignore_errors=True)
            raise
    return [f"{to.table} is an alias of the collection {name}"]


def _replace_collection(client: Any, folder: EmbeddingFolder, manifest: StoreManifest, to: Destination) -> str:
    """Write a collection, let the alias of the table name it, and return its name; remove the collections before it."""
    from qdrant_client import models

    def manifest_of(collection: str) -> str:
        return (client.get_collection(collection).config.metadata or {}).get(MANIFEST, "")

    names = [description.name for description in client.get_collections().collections]
    targets = {description.alias_name: description.collection_name for description in client.get_aliases().aliases}
    before = targets.get(to.table, to.table)  # a collection of this name has no manifest, and is not replaced
    if before in names:
        to.check_replaceable(manifest_of(before))
    left = [
        collection
        for collection in names
        if re.fullmatch(f"{re.escape(to.table)}-[0-9a-f]{{12}}", collection)
        and collection not in targets.values()
        and manifest_of(collection)
    ]
    index, name = manifest.index, f"{to.table}-{uuid4().hex[:12]}"
    distances = {"cosine": models.Distance.COSINE, "l2": models.Distance.EUCLID, "dot": models.Distance.DOT}
    graph = None if index.suits_graph() else models.HnswConfigDiff(m=0)  # 0: no graph
    vectors_config = models.VectorParams(size=index.dim, distance=distances[index.distance], hnsw_config=graph)
    try:
        client.create_collection(name, vectors_config=vectors_config, metadata={MANIFEST: manifest.text()})
        for items, vectors in rows_of(folder, index, to.bar):
            ids, payloads = items["id"].to_pylist(), items.select(["path", "label"]).to_pylist()
            for start in range(0, len(ids), SENT):
                sent = slice(start, start + SENT)
                batch = models.Batch(ids=ids[sent], vectors=vectors[sent].tolist(), payloads=payloads[sent])
                client.upsert(name, points=batch, wait=True)
        new_alias = models.CreateAlias(collection_name=name, alias_name=to.table)
        changes: list[Any] = [models.CreateAliasOperation(create_alias=new_alias)]
        if before in names:
            changes.insert(0, models.DeleteAliasOperation(delete_alias=models.DeleteAlias(alias_name=to.table)))
        client.update_collection_aliases(changes)
    except BaseException:
        client.delete_collection(name)
        raise
    for old in (*([before] if before in names else []), *left):
        client.delete_collection(old)
    return name
