"""Embeddings as a FAISS index."""

import shutil
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import PositiveInt

from dmlkit.embedding.finite import first_non_finite
from dmlkit.embedding.folder import BLOCK, EmbeddingFolder
from dmlkit.embedding.manifest import Manifest, SearchIndex
from dmlkit.errors import UserError
from dmlkit.files.atomic import atomic_write


class FaissIndex(SearchIndex, frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True):
    """A FAISS index of gallery vectors."""

    type: Literal["IndexFlatIP"] = "IndexFlatIP"
    """FAISS's class."""
    dim: PositiveInt
    """Coordinates of a vector; on some manifolds more than an embedding has."""


class FaissManifest(Manifest, frozen=True, strict=True, use_attribute_docstrings=True):
    """What stands beside a FAISS index: the manifest of its embeddings, and what is in the index."""

    kind: ClassVar[str] = "manifest of a FAISS index"

    index: FaissIndex
    """The search for the most similar ones."""


def write_faiss(folder: EmbeddingFolder, output: Path) -> list[Path]:
    """An IndexFlatIP over the manifold's index vectors; position i of the index is id i of the items.

    ``birds.faiss`` has ``birds.items.parquet`` and ``birds.manifest.json`` beside it, and ``birds.2023`` has
    ``birds.2023.items.parquet`` and ``birds.2023.manifest.json``.

    Raises:
        UserError: there are no embeddings, or one has no finite vector.
    """
    import faiss

    manifold = folder.manifold()
    index: Any = None
    for number, block in enumerate(folder.blocks()):
        vectors = manifold.index_vectors(block, "gallery").detach()
        row = first_non_finite(vectors)
        if row is not None:
            folder.refuse_row(number * BLOCK + row, "its vector in the index would have nan or inf")
        index = index or faiss.IndexFlatIP(vectors.shape[1])
        index.add(vectors.numpy())
    if index is None:
        raise UserError(f"{folder.path}: there are no embeddings to index")
    name = output.name.removesuffix(".faiss")
    items, manifest = output.with_name(f"{name}.items.parquet"), output.with_name(f"{name}.manifest.json")
    with atomic_write(output) as partial:
        faiss.write_index(index, str(partial))
    with atomic_write(items) as partial:
        shutil.copyfile(folder.path / "items.parquet", partial)
    formula = manifold.index_formula()
    described = FaissIndex(
        order=folder.manifest.index.order, query=formula["query"], gallery=formula["gallery"], dim=index.d
    )
    fields: dict[str, Any] = {**dict(folder.manifest), "index": described}
    FaissManifest(**fields).write(manifest)
    return [output, items, manifest]
