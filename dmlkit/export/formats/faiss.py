"""A FAISS index of the manifold's index vectors, for exact search by inner products."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import PositiveInt

from dmlkit.embedding.folder import BLOCK, EmbeddingFolder
from dmlkit.embedding.manifest import Manifest, SearchIndex
from dmlkit.errors import UserError
from dmlkit.export.formats.base import Format
from dmlkit.files.atomic import atomic_write
from dmlkit.files.outputs import writing
from dmlkit.manifolds.euclidean import Euclidean
from dmlkit.manifolds.numerics.check_points import find_invalid_point


class FaissIndex(SearchIndex, frozen=True, extra="forbid", strict=True):
    """A FAISS index of gallery vectors."""

    type: Literal["IndexFlatIP"] = "IndexFlatIP"
    """FAISS's class."""
    dim: PositiveInt
    """Dimension of a vector; on some manifolds larger than that of an embedding."""


class FaissManifest(Manifest, frozen=True, strict=True):
    """Manifest of a FAISS index: the manifest of its embeddings, and a description of the index."""

    kind: ClassVar[str] = "manifest of a FAISS index"
    older: ClassVar[dict[int, tuple[str, ...]]] = {3: (), 4: ()}

    index: FaissIndex  # pyright: ignore[reportGeneralTypeIssues] - unlike its parent's it has no default
    """How the index is searched."""


class Faiss(Format, name="faiss", file_name="index.faiss"):
    """An IndexFlatIP over the manifold's index vectors; position i of the index is id i of the items.

    ``birds.faiss`` comes with ``birds.items.parquet`` and ``birds.manifest.json``, and ``birds.2023`` with
    ``birds.2023.items.parquet`` and ``birds.2023.manifest.json``.
    """

    def write(self, folder: EmbeddingFolder, output: Path) -> list[Path]:
        import faiss

        manifold = folder.manifold
        index: Any = None
        for number, block in enumerate(folder.blocks()):
            vectors = manifold.index_vectors(block, "gallery").detach()
            # the square of a large finite number may be inf
            fault = find_invalid_point(Euclidean(vectors.shape[1]), vectors)
            if fault is not None:
                folder.refuse_row(number * BLOCK + fault[0], "its index vector would have nan or inf")
            index = index or faiss.IndexFlatIP(vectors.shape[1])
            index.add(vectors.numpy())
        if index is None:
            raise UserError(f"{folder.path}: there are no embeddings to index")
        _, items, manifest = self.files(output)
        described = FaissIndex(**manifold.index_form(), dim=index.d)
        fields: dict[str, Any] = {**dict(folder.manifest), "index": described, "checksums": None, "split": None}
        # the manifest is renamed first, so that files left by a kill are recognized as dmlkit's
        with (
            writing(output, RuntimeError),
            atomic_write(output) as index_path,
            atomic_write(items) as items_path,
            atomic_write(manifest) as manifest_path,
        ):
            with index_path.open("wb") as file:  # FAISS ignores a full disk and would leave half an index
                faiss.write_index(index, faiss.PyCallbackIOWriter(file.write))  # pyright: ignore[reportAttributeAccessIssue]
            shutil.copyfile(folder.path / "items.parquet", items_path)
            manifest_path.write_text(FaissManifest(**fields).text(), encoding="utf-8")
        return [output, items, manifest]

    def is_mine(self, output: Path) -> bool:
        return FaissManifest.is_at(self.files(output)[-1])

    def files(self, output: Path) -> list[Path]:
        name = output.name.removesuffix(".faiss")
        return [output, output.with_name(f"{name}.items.parquet"), output.with_name(f"{name}.manifest.json")]

    def check(self, output: Path, sources: Sequence[Path]) -> None:
        """Check as every format, and that no index of almost the same name uses the same items."""
        if not output.name:
            raise UserError("--output: expected the name of a file")
        name = output.name.removesuffix(".faiss")
        twin = output.with_name(name if output.name != name else f"{name}.faiss")
        if twin.is_file():
            items = self.files(output)[1].name
            raise UserError(
                f"--output {output}: {twin.name} already exists and uses the same {items}; choose another name"
            )
        super().check(output, sources)
