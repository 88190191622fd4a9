"""Embeddings as a FAISS index."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import PositiveInt

from dmlkit.embedding.folder import BLOCK, EmbeddingFolder
from dmlkit.embedding.manifest import Manifest, SearchIndex
from dmlkit.errors import UserError
from dmlkit.files.atomic import atomic_write
from dmlkit.files.outputs import check_output, writing
from dmlkit.manifolds.euclidean import Euclidean
from dmlkit.manifolds.numerics.check_points import fault_in


class FaissIndex(SearchIndex, frozen=True, extra="forbid", strict=True):
    """A FAISS index of gallery vectors."""

    type: Literal["IndexFlatIP"] = "IndexFlatIP"
    """FAISS's class."""
    dim: PositiveInt
    """Coordinates of a vector; on some manifolds more than an embedding has."""


class FaissManifest(Manifest, frozen=True, strict=True):
    """What stands beside a FAISS index: the manifest of its embeddings, and what is in the index."""

    kind: ClassVar[str] = "manifest of a FAISS index"
    older: ClassVar[dict[int, tuple[str, ...]]] = {3: ()}

    index: FaissIndex  # pyright: ignore[reportGeneralTypeIssues] - unlike its parent's it has no default
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
        fault = fault_in(Euclidean(vectors.shape[1]), vectors)  # large numbers are points, their squares may be none
        if fault is not None:
            folder.refuse_row(number * BLOCK + fault[0], "its vector in the index would have nan or inf")
        index = index or faiss.IndexFlatIP(vectors.shape[1])
        index.add(vectors.numpy())
    if index is None:
        raise UserError(f"{folder.path}: there are no embeddings to index")
    items, manifest = beside(output)
    described = FaissIndex(**manifold.index_form(), dim=index.d)
    fields: dict[str, Any] = {**dict(folder.manifest), "index": described, "checksums": None}
    # the manifest is renamed first: whatever a kill leaves has one, and is dmlkit's
    with (
        writing(output, RuntimeError),
        atomic_write(output) as index_path,
        atomic_write(items) as items_path,
        atomic_write(manifest) as manifest_path,
    ):
        with index_path.open("wb") as file:  # FAISS itself takes no notice of a full disk: it would leave half an index
            faiss.write_index(index, faiss.PyCallbackIOWriter(file.write))  # pyright: ignore[reportAttributeAccessIssue]
        shutil.copyfile(folder.path / "items.parquet", items_path)
        manifest_path.write_text(FaissManifest(**fields).text(), encoding="utf-8")
    return [output, items, manifest]


def beside(index: Path) -> tuple[Path, Path]:
    """The items and the manifest of an index."""
    name = index.name.removesuffix(".faiss")
    return index.with_name(f"{name}.items.parquet"), index.with_name(f"{name}.manifest.json")


def check_index(output: Path, sources: Sequence[Path]) -> None:
    """Make sure that an index, its items and its manifest may be written.

    Raises:
        UserError: one of them is somebody else's, or belongs to an index of almost the same name.
    """
    if not output.name:
        raise UserError("--output: expected the name of a file")
    items, manifest = beside(output)
    name = output.name.removesuffix(".faiss")
    twin = output.with_name(name if output.name != name else f"{name}.faiss")
    if twin.is_file():
        raise UserError(f"--output {output}: {twin.name} is there already and would share {items.name}; choose another")
    for path in (output, items, manifest):
        check_output(path, lambda _: FaissManifest.is_at(manifest), sources=sources)
