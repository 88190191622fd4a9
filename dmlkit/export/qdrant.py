"""Export of embeddings as a collection of Qdrant."""

import json
import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

from dmlkit.embedding.folder import EmbeddingFolder
from dmlkit.embedding.progress_bar import Bar
from dmlkit.errors import UserError
from dmlkit.export.store import Destination, StoreManifest, is_address, rows_of, store_manifest

MARK = "dmlkit"  # key of the manifest in a collection's metadata
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
    try:
        return "meta.json" not in names or "collections" in json.loads(
            (folder / "meta.json").read_text(encoding="utf-8")
        )
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
    return (client.get_collection(collection).config.metadata or {}).get(MARK, "")


def _fill(client: Any, name: str, folder: EmbeddingFolder, manifest: StoreManifest, bar: Bar) -> None:
    from qdrant_client import models

    distances = {"cosine": models.Distance.COSINE, "l2": models.Distance.EUCLID, "dot": models.Distance.DOT}
    described = models.VectorParams(
        size=manifest.index.dim,
        distance=distances[manifest.index.distance],
        hnsw_config=None if manifest.index.suits_graph() else models.HnswConfigDiff(m=0),  # 0: no graph
    )
    client.create_collection(name, vectors_config=described, metadata={MARK: manifest.text()})
    for items, vectors in rows_of(folder, manifest.index, bar):
        ids, payloads = items["id"].to_pylist(), items.select(["path", "label"]).to_pylist()
        for start in range(0, len(ids), SENT):
            sent = slice(start, start + SENT)
            batch = models.Batch(ids=ids[sent], vectors=vectors[sent].tolist(), payloads=payloads[sent])
            client.upsert(name, points=batch, wait=True)
