"""Embeddings as a FAISS index."""

import shutil
from pathlib import Path
from typing import Any

from dmlkit.embedding.folder import EmbeddingFolder
from dmlkit.errors import UserError
from dmlkit.files.atomic import atomic_write, write_json


def write_faiss(folder: EmbeddingFolder, output: Path) -> list[Path]:
    """An IndexFlatIP over the manifold's index vectors; position i of the index is id i of the items."""
    import faiss

    manifold = folder.manifold()
    index: Any = None
    for block in folder.blocks():
        vectors = manifold.index_vectors(block, "gallery").detach().numpy()
        index = index or faiss.IndexFlatIP(vectors.shape[1])
        index.add(vectors)
    if index is None:
        raise UserError(f"{folder.path}: there are no embeddings to index")
    items, manifest = output.with_suffix(".items.parquet"), output.with_suffix(".manifest.json")
    with atomic_write(output) as partial:
        faiss.write_index(index, str(partial))
    shutil.copyfile(folder.path / "items.parquet", items)
    formula = {"type": "IndexFlatIP", "dim": index.d, **manifold.index_formula()}
    write_json(manifest, folder.manifest | {"index": folder.manifest["index"] | formula})
    return [output, items, manifest]
