"""Other people's stores: what is in them is what was embedded, and their neighbors are those of the exact search."""

import importlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import lancedb
import numpy as np
import psycopg
import pyarrow as pa
import pytest
import torch
from psycopg import sql
from pyarrow import parquet
from qdrant_client import QdrantClient, models

from dmlkit.errors import UserError
from dmlkit.export.databases import StoreManifest
from dmlkit.export.export import export_to_store
from dmlkit.nearest.search import Gallery
from dmlkit.vectors.folder import EmbeddingFolder
from dmlkit.vectors.index_vectors import index_vectors
from dmlkit.vectors.manifest import Manifest
from tests.conftest import END, Cli, refuses
from tests.processes import Forked
from tests.vectors.stored import EUCLIDEAN, POINTS, embeddings_at, manifest

SPHERE = {"name": "sphere", "proxies": "features", "similarity": "cosine", "metric": "chord"}
FLAT = {"name": "euclidean", "proxies": "features"}
BENT = {"proxies": "features", "curvature": -0.7, "learnable_curvature": False, "clip_distance": None}
GEOMETRIES: dict[str, tuple[dict[str, Any], str, str]] = {
    "cosine": (SPHERE, "cosine", "as_is"),
    "chord": ({**SPHERE, "similarity": "negative_squared_distance"}, "l2", "as_is"),
    "flat": ({**FLAT, "similarity": "negative_distance"}, "l2", "as_is"),
    "dot": ({**FLAT, "similarity": "dot"}, "dot", "as_is"),
    "flat cosine": ({**FLAT, "similarity": "cosine"}, "cosine", "as_is"),
    "ball": ({"name": "poincare", **BENT, "similarity": "negative_distance"}, "dot", "poincare_lift"),
    "sheet": ({"name": "lorentz", **BENT, "similarity": "negative_squared_distance"}, "dot", "lorentz_lift"),
    "sheet cosine": ({"name": "lorentz", **BENT, "similarity": "origin_cosine"}, "cosine", "unit_space"),
}
"""By name the manifold, and the distance function and the form of vectors that a store should have."""
LABELS = ["robin", None, "gull's", "Größe\t\\N", ""]
STORES = ["lancedb", "qdrant", pytest.param("pgvector", marks=pytest.mark.postgres)]


class Stored(NamedTuple):
    """A table as its store has it."""

    manifest: StoreManifest
    rows: dict[int, tuple[str, str | None, Any]]
    distance: str


class Server(NamedTuple):
    """A PostgreSQL of its own."""

    address: str
    user: str | None  # that it must run as


def pg_config() -> str | None:
    """The newest installation that has pgvector: the one that PG_CONFIG names, or Debian's."""
    named = os.environ.get("PG_CONFIG")
    found = [named] if named else sorted(map(str, Path("/usr/lib/postgresql").glob("*/bin/pg_config")), reverse=True)
    for program in found:
        shared = subprocess.run([program, "--sharedir"], capture_output=True, text=True, check=True).stdout.strip()
        if (Path(shared) / "extension" / "vector.control").exists():
            return program
    return None


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """The address of a PostgreSQL with pgvector in a temporary folder, where that is installed."""
    program = pg_config()
    if program is None:
        pytest.skip("needs PostgreSQL with pgvector: Debian's postgresql-NN-pgvector, or PG_CONFIG=/path/to/pg_config")
    binaries = Path(subprocess.run([program, "--bindir"], capture_output=True, text=True, check=True).stdout.strip())
    user = "postgres" if os.geteuid() == 0 else None  # it refuses to run as root
    folder = Path(tempfile.mkdtemp(prefix="dmlkit-postgres-"))
    try:
        if user:
            shutil.chown(folder, user)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]

        def call(*words: str) -> None:
            subprocess.run(words, check=True, user=user, cwd=folder, stdout=subprocess.DEVNULL, env={"LC_ALL": "C"})

        (folder / "password").write_text("p@ss:w/rd")
        data = ["-D", str(folder / "data")]
        secret = ["--auth=scram-sha-256", f"--pwfile={folder}/password"]
        call(str(binaries / "initdb"), *data, "-U", "me", "-E", "UTF8", "--no-sync", *secret)
        options = f"-c fsync=off -c listen_addresses=127.0.0.1 -c port={port} -c unix_socket_directories={folder}"
        call(str(binaries / "pg_ctl"), *data, "-w", "-l", str(folder / "log"), "-o", options, "start")
        try:
            yield f"postgresql://me:p%40ss%3Aw%2Frd@127.0.0.1:{port}/postgres"
        finally:
            call(str(binaries / "pg_ctl"), *data, "-m", "immediate", "stop")
    finally:
        shutil.rmtree(folder)


@pytest.fixture
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], str]:
    """Where a store of a format is."""

    def of(kind: str) -> str:
        if kind != "pgvector":
            return str(tmp_path / "store")
        address = request.getfixturevalue("postgres")
        with psycopg.connect(address, autocommit=True) as connection:
            connection.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
            connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
        return address

    return of


def stored_in(kind: str, target: str, table: str = "embeddings") -> Stored:
    """What is in a store, read with the store's own program."""
    if kind == "lancedb":
        found: Any = lancedb.connect(target).open_table(table).to_arrow()
        manifest = (found.schema.metadata or {})[b"dmlkit"].decode()
        rows = {
            row["id"]: (row["path"], row["label"], np.array(row["vector"], np.float32)) for row in found.to_pylist()
        }
        distance = json.loads(manifest)["index"]["distance"]  # LanceDB takes it with each search
    elif kind == "qdrant":
        client: Any = QdrantClient(path=target)
        config = client.get_collection(table).config
        manifest = config.metadata["dmlkit"]
        points = client.scroll(table, limit=10_000, with_vectors=True)[0]
        rows = {one.id: (one.payload["path"], one.payload["label"], np.array(one.vector, np.float32)) for one in points}
        distance = {"Cosine": "cosine", "Euclid": "l2", "Dot": "dot"}[config.params.vectors.distance]
        client.close()
    else:
        with psycopg.connect(target) as opened:
            connection: Any = opened
            name = sql.Identifier(table)
            found = connection.execute(sql.SQL("SELECT id, path, label, vector::real[] FROM {}").format(name))
            rows = {row: (path, label, np.array(vector, np.float32)) for row, path, label, vector in found}
            ((manifest,),) = connection.execute("SELECT obj_description(%s::regclass)", [name.as_string(connection)])
            indexes = connection.execute("SELECT indexdef FROM pg_indexes WHERE tablename = %s", [table]).fetchall()
        # lifted vectors have no index, and are compared by their products
        (index,) = [one for (one,) in indexes if "USING hnsw" in one] or ["(vector vector_ip_ops)"]
        distance = {"cosine_ops": "cosine", "l2_ops": "l2", "ip_ops": "dot"}[index.split("vector_")[-1].strip(")")]
    return Stored(StoreManifest.from_json(manifest, kind), rows, distance)


def nearest(kind: str, target: str, index: Mapping[str, Any], queries: np.ndarray, k: int) -> Any:
    """The ids that a store finds."""
    queries, distance = index_vectors(queries, index, "query").astype(np.float32), index["distance"]
    if kind == "lancedb":
        table: Any = lancedb.connect(target).open_table("embeddings")
        found = [table.search(query).distance_type(distance).limit(k).to_arrow()["id"].to_pylist() for query in queries]
    elif kind == "qdrant":
        client: Any = QdrantClient(path=target)
        found = [
            [point.id for point in client.query_points("embeddings", query=query.tolist(), limit=k).points]
            for query in queries
        ]
        client.close()
    else:
        operator = {"cosine": "<=>", "l2": "<->", "dot": "<#>"}[distance]
        with psycopg.connect(target) as opened:
            connection: Any = opened
            connection.execute("SET enable_seqscan = off")  # through the index
            statement = f"SELECT id FROM embeddings ORDER BY vector {operator} %s::vector LIMIT %s"
            plan = connection.execute(f"EXPLAIN {statement}", [str(queries[0].tolist()), k]).fetchall()
            assert ("Index Scan using embeddings_vector_idx" in str(plan)) != index["form"].endswith("_lift")
            found = [
                [row for (row,) in connection.execute(statement, [str(query.tolist()), k]).fetchall()]
                for query in queries
            ]
    return found


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("kind", STORES)
def test_a_store_has_what_was_embedded_and_finds_what_the_exact_search_finds(kind: Any, geometry, tmp_path, target):
    options, distance, form = GEOMETRIES[geometry]
    shape = {"manifold": options, "similarity": options["similarity"]}
    space = Manifest.parse(manifest(**shape), "manifest").manifold.build(6)
    generator = torch.Generator().manual_seed(0)
    points = space.from_features(torch.randn(200, 6, generator=generator))
    queries = space.from_features(torch.randn(20, 6, generator=generator))
    path = embeddings_at(tmp_path / "out", points.numpy(), dim=space.point_dim, features=6, **shape)
    items = parquet.read_table(path / "items.parquet")
    labels = pa.array([LABELS[row % 5] for row in range(200)])
    parquet.write_table(items.set_column(2, "label", labels), path / "items.parquet")

    folder, store = EmbeddingFolder(path), target(kind)
    export_to_store(folder, kind, store, None)
    found = stored_in(kind, store)
    assert (found.distance, found.manifest.index.distance, found.manifest.index.form) == (distance, distance, form)
    assert found.manifest.model == folder.manifest.model and found.manifest.manifold == folder.manifest.manifold
    index = found.manifest.plain()["index"]
    expected = index_vectors(points.numpy(), index, "gallery").astype(np.float32)
    vectors = np.stack([found.rows[row][2] for row in range(200)])
    if kind == "qdrant" and distance == "cosine":  # which normalizes what it stores, in local mode when it is read
        vectors, expected = (one / np.linalg.norm(one, axis=1, keepdims=True) for one in (vectors, expected))
        np.testing.assert_allclose(vectors, expected, rtol=0, atol=3e-7)
    else:
        assert np.array_equal(vectors, expected)
        assert form != "as_is" or np.array_equal(expected, points.numpy())
    assert {row: found.rows[row][:2] for row in found.rows} == {
        row: (f"photos/{row}.jpg", LABELS[row % 5]) for row in range(200)
    }
    near = nearest(kind, store, index, queries.numpy(), 5)
    assert near == Gallery(space, points).search(queries, k=5).indices.tolist()


@pytest.mark.parametrize("kind", STORES)
def test_a_table_is_replaced_when_asked_and_if_it_is_ours(kind: Any, tmp_path, target: Callable[[str], str], dmlkit):
    store = target(kind)
    embeddings_at(tmp_path / "a", POINTS)
    embeddings_at(tmp_path / "b", POINTS[:3])
    words = ("--format", kind, "-o", store, "--table", "Birds-2")
    assert "table 'Birds-2'" in dmlkit("export", tmp_path / "a", *words).ok().out
    dmlkit("export", tmp_path / "b", *words).refused("table 'Birds-2' already exists; replace it with --overwrite")
    assert len(stored_in(kind, store, "Birds-2").rows) == 5
    assert dmlkit("export", tmp_path / "b", *words, "--overwrite").code == 0
    assert len(stored_in(kind, store, "Birds-2").rows) == 3
    if kind == "lancedb":
        lancedb.connect(store).create_table("mine", pa.table({"x": [1]}))
    elif kind == "qdrant":
        client = QdrantClient(path=store)
        assert [collection.name[:8] for collection in client.get_collections().collections] == ["Birds-2-"]
        client.create_collection("mine", vectors_config=models.VectorParams(size=1, distance=models.Distance.DOT))
        client.close()
    else:
        with psycopg.connect(store) as connection:
            connection.execute("CREATE TABLE mine (x int); COMMENT ON TABLE mine IS '{}'")
    for more in ((), ("--overwrite",)):
        result = dmlkit("export", tmp_path / "a", *words[:4], "--table", "mine", *more)
        result.refused("table 'mine' already exists", "was not written by" if more else "--overwrite")
    assert len(stored_in(kind, store, "Birds-2").rows) == 3


@pytest.mark.parametrize("kind", STORES)
def test_a_failed_export_leaves_what_was_there(kind: Any, tmp_path: Path, target: Callable[[str], str], monkeypatch):
    monkeypatch.setattr("dmlkit.export.databases.ROWS", 2)
    store = target(kind)
    broken = POINTS.copy()
    broken[4] = 0
    flat = {**EUCLIDEAN, "similarity": "cosine"}  # where 0 is a point
    faulty = EmbeddingFolder(embeddings_at(tmp_path / "faulty", broken, manifold=flat))
    message = r"row 4 \(photos/4\.jpg\): its vector is zero, which has no cosine"
    refuses(message, export_to_store, faulty, kind, store, None)
    assert tables_in(kind, store) == []
    export_to_store(EmbeddingFolder(embeddings_at(tmp_path / "good")), kind, store, None)
    refuses(message, export_to_store, faulty, kind, store, None, overwrite=True)
    assert len(stored_in(kind, store).rows) == 5 and len(tables_in(kind, store)) == 1
    with pytest.raises(UserError, match="there are no embeddings to export"):
        export_to_store(EmbeddingFolder(embeddings_at(tmp_path / "none", POINTS[:0])), kind, store, "none")
    broken[4] = np.nan
    refuses("nan or inf", export_to_store, EmbeddingFolder(embeddings_at(tmp_path / "nan", broken)), kind, store, "nan")


def tables_in(kind: str, target: str) -> list[str]:
    if kind == "lancedb":
        return list(lancedb.connect(target).list_tables().tables) if Path(target).exists() else []
    if kind == "qdrant":
        client: Any = QdrantClient(path=target)
        names = [collection.name for collection in client.get_collections().collections]
        client.close()
        return names
    with psycopg.connect(target) as connection:
        found = connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")
        return [name for (name,) in found]


def killed_export(kind: Any, path: Path, target: str) -> None:
    """Export, and be killed when some rows are written."""
    module = importlib.import_module("dmlkit.export.databases")
    whole, calls = module.rows_of, iter(range(9))

    def rows_of(*words: Any) -> Iterator[Any]:
        writes = next(calls) == (kind == "lancedb")  # which looks at all rows first
        for number, rows in enumerate(whole(*words)):
            if writes and number == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            yield rows

    module.__dict__["rows_of"] = rows_of
    module.__dict__["ROWS"] = 2
    export_to_store(EmbeddingFolder(path), kind, target, None, overwrite=True)


@pytest.mark.heavy
@pytest.mark.parametrize("kind", STORES)
def test_a_kill_leaves_the_table_that_was_there(kind: Any, tmp_path: Path, target: Callable[[str], str]):
    store, folder = target(kind), EmbeddingFolder(embeddings_at(tmp_path / "out"))
    for rows in (0, 5):
        assert Forked(killed_export, kind, folder.path, store).wait(END) == -signal.SIGKILL
        if rows:
            assert len(stored_in(kind, store).rows) == rows
        export_to_store(folder, kind, store, None, overwrite=bool(rows))
        assert len(stored_in(kind, store).rows) == 5 and len(tables_in(kind, store)) == 1


def test_collections_of_other_tables_are_no_remains(tmp_path: Path):
    folder, store = EmbeddingFolder(embeddings_at(tmp_path / "out")), str(tmp_path / "qdrant")
    export_to_store(folder, "qdrant", store, "birds-2020", overwrite=False)
    client = QdrantClient(path=store)
    client.update_collection_aliases(
        [models.DeleteAliasOperation(delete_alias=models.DeleteAlias(alias_name="birds-2020"))]
    )
    client.close()
    export_to_store(folder, "qdrant", store, "birds", overwrite=False)
    client = QdrantClient(path=store)
    names = sorted(collection.name.rpartition("-")[0] for collection in client.get_collections().collections)
    client.close()
    assert names == ["birds", "birds-2020"]


def test_what_cannot_be_is_refused(tmp_path: Path, dmlkit: Cli, monkeypatch: pytest.MonkeyPatch):
    out = embeddings_at(tmp_path / "out")
    dmlkit("export", out, "--format", "npz", "-o", "http://me:secret@db").refused("--output: got an address")
    dmlkit("export", out, "--format", "pgvector").refused("expected --output postgresql://")
    dmlkit("export", out, "--format", "pgvector", "-o", "birds").refused("expected --output")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "x.txt").write_text("mine")
    dmlkit("export", out, "--format", "qdrant", "-o", tmp_path / "photos").refused(
        "has x.txt but not a collection of Qdrant"
    )
    dmlkit("export", out, "--format", "lancedb", "-o", tmp_path / "photos" / "x.txt").refused("x.txt")
    dmlkit("export", out, "--format", "lancedb", "--table", "a/b").refused("table 'a/b' cannot be written: Invalid")
    dmlkit("export", out, "--format", "qdrant", "--table", "a/b").refused("table 'a/b' cannot be written: Coll")
    for blank in ("", " "):
        dmlkit("export", out, "--format", "qdrant", "--table", blank).refused(f"--table {blank!r}: expected a name")
    dmlkit("export", out, "--format", "lancedb", "--table", "").refused("table '' cannot be written")
    address = "postgresql://me@127.0.0.1:1/birds"
    dmlkit("export", out, "--format", "pgvector", "-o", address, "--table", "x" * 64).refused("1 to 63 bytes")
    dmlkit("export", out, "--format", "pgvector", "-o", address, "--table", "").refused("1 to 63 bytes")
    for package, kind in (("qdrant_client", "qdrant"), ("psycopg", "pgvector"), ("lancedb", "lancedb")):
        monkeypatch.setitem(sys.modules, package, None)
        dmlkit("export", out, "--format", kind, "-o", address).refused("install it with: pip install 'dmlkit[")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["out", "photos"]
    assert [entry.name for entry in (tmp_path / "photos").iterdir()] == ["x.txt"]


@pytest.mark.parametrize(
    "address",
    [
        "postgresql://me:secret@127.0.0.1:1/birds",
        "postgresql://127.0.0.1:1/birds?user=me&password=secret",
        "postgresql://me:sec@secret@127.0.0.1:1/birds",
        "postgresql://me:secret/@127.0.0.1:1/birds",
        "postgresql://me:secret#@127.0.0.1:1/birds",
        "postgresql://me:secret:@[::1/birds",
        "http://me:secret@127.0.0.1:1",
        "http://me:secret#x@127.0.0.1:1",
    ],
)
def test_a_password_is_never_told(address: str, tmp_path: Path, dmlkit: Cli):
    kind = "pgvector" if address.startswith("postgresql") else "qdrant"
    result = dmlkit("export", embeddings_at(tmp_path / "out"), "--format", kind, "-o", address)
    assert result.code == 2 and "sec" not in result.out + result.err
    result.refused(address.partition("://")[0] + "://")


@pytest.mark.postgres
def test_postgres_takes_any_name_and_keeps_no_password(postgres: str, target: Callable[[str], str], tmp_path, dmlkit):
    address, name = target("pgvector"), 'a"; DROP TABLE x; --'
    result = dmlkit("export", embeddings_at(tmp_path / "out"), "--format", "pgvector", "-o", address, "--table", name)
    assert result.code == 0 and "p%40ss" not in result.out and "vector_cosine_ops" in result.out, result.err
    assert tables_in("pgvector", address) == [name] and len(stored_in("pgvector", address, name).rows) == 5
    assert "p%40ss" not in str(stored_in("pgvector", address, name).manifest)
    wrong = address.replace("p%40ss", "p%40zz")
    result = dmlkit("export", tmp_path / "out", "--format", "pgvector", "-o", wrong)
    result.refused("password authentication failed")
    assert "zz" not in result.err and "w/rd" not in result.err
    none = address.replace("/postgres", "/none")
    dmlkit("export", tmp_path / "out", "--format", "pgvector", "-o", none).refused('"none"')
    with psycopg.connect(address) as connection:
        connection.execute("DROP EXTENSION vector CASCADE; CREATE ROLE guest LOGIN PASSWORD 'g'")
        connection.execute("GRANT ALL ON SCHEMA public TO guest")
    guest = address.replace("me:p%40ss%3Aw%2Frd", "guest:g")
    dmlkit("export", tmp_path / "out", "--format", "pgvector", "-o", guest).refused(
        "permission denied to create extension"
    )


@pytest.mark.postgres
@pytest.mark.parametrize(
    ("dim", "index"), [(2000, "vector_cosine_ops"), (2001, "halfvec_cosine_ops"), (4001, "no index")]
)
def test_postgres_indexes_wide_vectors_by_their_halves(dim: int, index: str, target: Callable[[str], str], tmp_path):
    address = target("pgvector")
    points = np.eye(3, dim, dtype=np.float32)
    folder = EmbeddingFolder(embeddings_at(tmp_path / "out", points, dim=dim, features=dim))
    _, notes = export_to_store(folder, "pgvector", address, None)
    with psycopg.connect(address) as connection:
        indexes = [one for (one,) in connection.execute("SELECT indexdef FROM pg_indexes") if "hnsw" in one]
    assert index in notes[0] and [index in one for one in indexes] == ([] if index == "no index" else [True])


def test_a_full_disk_is_told_and_hinders_no_second_try(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = EmbeddingFolder(embeddings_at(tmp_path / "out"))

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    for kind, module, name in (
        ("qdrant", "qdrant_client.local.qdrant_local.QdrantLocal", "_save"),
        ("lancedb", "lancedb.db.LanceDBConnection", "create_table"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(f"{module}.{name}", full)
            with pytest.raises(UserError, match=r"table 'embeddings' cannot be written: .*No space left on device$"):
                export_to_store(folder, kind, str(tmp_path / kind), None)
        export_to_store(folder, kind, str(tmp_path / kind), None)
        assert len(stored_in(kind, str(tmp_path / kind)).rows) == 5
