"""A FAISS index of the manifold's index vectors, for search by inner products or, of bits, by Hamming distances."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from pydantic import PositiveInt

from dmlkit.errors import UserError
from dmlkit.export.formats.base import Format
from dmlkit.export.wanted import IndexPrecision
from dmlkit.files.atomic import atomic_write
from dmlkit.files.outputs import writing
from dmlkit.manifolds.base import find_invalid_point
from dmlkit.manifolds.euclidean import Euclidean
from dmlkit.manifolds.sphere import Sphere
from dmlkit.nearest.search import BLOCK_ROWS
from dmlkit.vectors.folder import EmbeddingFolder
from dmlkit.vectors.manifest import Manifest, SearchIndex

if TYPE_CHECKING:
    from numpy.typing import NDArray

QUERIES, NEAREST = 1000, 10  # images whose neighbors are compared with those of the full vectors


IndexType = Literal["IndexFlatIP", "IndexScalarQuantizer", "IndexBinaryFlat"]
TYPES: dict[IndexPrecision, IndexType] = {
    "fp32": "IndexFlatIP",
    "fp16": "IndexScalarQuantizer",
    "int8": "IndexScalarQuantizer",
    "binary": "IndexBinaryFlat",
}


class FaissIndex(SearchIndex, frozen=True, extra="forbid", strict=True):
    """A FAISS index of gallery vectors."""

    type: IndexType = "IndexFlatIP"
    """FAISS's class."""
    dim: PositiveInt
    """Dimension of a vector; on some manifolds larger than that of an embedding."""


class FaissManifest(Manifest, frozen=True, strict=True):
    """Manifest of a FAISS index: the manifest of its embeddings, and a description of the index."""

    kind: ClassVar[str] = "manifest of a FAISS index"

    index: FaissIndex  # pyright: ignore[reportGeneralTypeIssues] - unlike its parent's it has no default
    """How the index is searched."""


class Faiss(Format, name="faiss", file_name="index.faiss"):
    """An index over the manifold's index vectors; position i of the index is id i of the items.

    An IndexFlatIP of float32. On the sphere also an IndexScalarQuantizer of ``fp16`` or ``int8`` (256 steps between the
    smallest and the largest value of each coordinate), or an IndexBinaryFlat of the signs (``binary``: a bit is set for
    a coordinate of at least 0, in the order of ``numpy.packbits``). Elsewhere an index vector holds a norm, whose
    rounding would change the order of neighbors.

    ``birds.faiss`` comes with ``birds.faiss.items.parquet`` and ``birds.faiss.json``.
    """

    precision: IndexPrecision = "fp32"

    def at(self, precision: IndexPrecision) -> Format:
        """Return the format with an index of a precision."""
        copied = Faiss()
        copied.precision = precision
        return copied

    def write(self, folder: EmbeddingFolder, output: Path) -> list[Path]:
        import faiss

        manifold = folder.manifold
        if self.precision != "fp32" and not isinstance(manifold, Sphere):
            raise UserError(
                f"export: --precision {self.precision} applies to embeddings on the sphere, and {folder.path} has a "
                "manifold whose vectors hold a norm, which must not be rounded"
            )
        index: Any = None
        for number, block in enumerate(folder.blocks()):
            vectors = manifold.index_vectors(block, "gallery").detach()
            # the square of a large finite number may be inf
            fault = find_invalid_point(Euclidean(vectors.shape[1]), vectors)
            if fault is not None:
                folder.refuse_row(number * BLOCK_ROWS + fault[0], "its index vector would have nan or inf")
            index = index or self._new_index(folder, vectors.shape[1])
            index.add(pack(vectors.numpy()) if self.precision == "binary" else vectors.numpy())
        if index is None:
            raise UserError(f"{folder.path}: there are no embeddings to index")
        _, items, manifest = self.files(output)
        described = FaissIndex(**manifold.index_form(), type=TYPES[self.precision], dim=index.d)
        fields: dict[str, Any] = {**dict(folder.manifest), "index": described, "checksums": None}
        with (
            writing(output, RuntimeError),
            atomic_write(output) as index_path,
            atomic_write(items) as items_path,
            atomic_write(manifest) as manifest_path,
        ):
            with index_path.open("wb") as file:  # FAISS ignores a full disk and would leave half an index
                write = faiss.write_index_binary if self.precision == "binary" else faiss.write_index
                write(index, faiss.PyCallbackIOWriter(file.write))  # pyright: ignore[reportAttributeAccessIssue]
            shutil.copyfile(folder.path / "items.parquet", items_path)
            manifest_path.write_text(FaissManifest(**fields).text(), encoding="utf-8")
        return [output, items, manifest]

    def _new_index(self, folder: EmbeddingFolder, dim: int) -> Any:
        """Return an index without vectors; the ranges of int8 are those of the embeddings."""
        import faiss

        match self.precision:
            case "fp32":
                return faiss.IndexFlatIP(dim)
            case "binary":
                return faiss.IndexBinaryFlat(8 * -(-dim // 8))
            case _:
                bits = {"fp16": faiss.ScalarQuantizer.QT_fp16, "int8": faiss.ScalarQuantizer.QT_8bit}[self.precision]
                index = faiss.IndexScalarQuantizer(dim, bits, faiss.METRIC_INNER_PRODUCT)
                low, high = folder.points.min(0), folder.points.max(0)
                index.train(np.stack([low, high]))
                return index

    def files(self, output: Path) -> list[Path]:
        return [output, *(output.with_name(f"{output.name}.{end}") for end in ("items.parquet", "json"))]


def pack(vectors: "NDArray[np.float32]") -> "NDArray[np.uint8]":
    """Return the signs (N, D / 8) uint8 of vectors (N, D), which search an index of bits.

    Example:
        >>> pack(np.array([[0.5, -0.1, 0.0]], dtype=np.float32))
        array([[160]], dtype=uint8)
    """
    return np.packbits(vectors >= 0, axis=1)


def cost_of(folder: EmbeddingFolder, path: Path, precision: IndexPrecision) -> str:
    """Return what an index of lower precision saves, and the share of the 10 nearest images that it finds.

    It is measured on evenly spaced images of the index, each searched without itself; a single one finds nothing.
    """
    import faiss

    points = np.asarray(folder.points)
    rows = np.unique(np.linspace(0, len(points) - 1, QUERIES).astype(np.int64))
    queries, count = points[rows], min(NEAREST + 1, len(points))
    index: Any = (faiss.read_index_binary if precision == "binary" else faiss.read_index)(str(path))
    size = "1 byte" if index.code_size == 1 else f"{index.code_size} bytes"
    saved = f"{size} per vector instead of {4 * points.shape[1]}"
    if count == 1:
        return saved
    asked = pack(queries) if precision == "binary" else queries
    retrieved = index.search(asked, count)[1]
    _, nearest = faiss.knn(queries, points, count, metric=faiss.METRIC_INNER_PRODUCT)  # without a copy of the points
    # an image may come after others that are equal to it
    best = [[other for other in line if other != row][: count - 1] for line, row in zip(nearest, rows, strict=True)]
    mine = [[other for other in line if other != row][: count - 1] for line, row in zip(retrieved, rows, strict=True)]
    share = np.mean([len({*left} & {*right}) for left, right in zip(best, mine, strict=True)]) / (count - 1)
    return f"{saved}; it finds {share:.3f} of the {count - 1} nearest of {len(rows)} images of the index"
