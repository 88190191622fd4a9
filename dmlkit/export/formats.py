"""File formats of embeddings: FAISS indexes, Parquet, NumPy arrays, and folders for TensorBoard's projector."""

import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import PositiveInt

from dmlkit.errors import UserError
from dmlkit.export.wanted import EmbeddingFormat, IndexPrecision
from dmlkit.files.atomic import atomic_write
from dmlkit.files.outputs import check_file, check_folder, writing
from dmlkit.manifolds.sphere import Sphere
from dmlkit.nearest.search import BLOCK_ROWS
from dmlkit.vectors.folder import EmbeddingFolder
from dmlkit.vectors.manifest import Manifest, SearchIndex

PROJECTOR = "projector_config.pbtxt"
QUERIES, NEAREST = 1000, 10  # images whose neighbors are compared with those of the full vectors


class FaissIndex(SearchIndex, frozen=True, extra="forbid", strict=True):
    """A FAISS index of gallery vectors."""

    type: Literal["IndexFlatIP", "IndexScalarQuantizer", "IndexBinaryFlat"] = "IndexFlatIP"
    """FAISS's class."""
    dim: PositiveInt
    """Dimension of a vector; on some manifolds larger than that of an embedding."""


class FaissManifest(Manifest, frozen=True, strict=True):
    """Manifest of a FAISS index: the manifest of its embeddings, and a description of the index."""

    kind: ClassVar[str] = "manifest of a FAISS index"

    index: FaissIndex  # pyright: ignore[reportGeneralTypeIssues] - unlike its parent's it has no default
    """How the index is searched."""


def write_npz(folder: EmbeddingFolder, output: Path) -> None:
    """Write arrays ``embeddings ids paths labels``, readable without pickle; a missing label is an empty string.

    Boxes are left out.
    """
    with atomic_write(output) as partial, partial.open("wb") as file:
        np.savez(
            file,
            embeddings=folder.points,
            ids=folder.items["id"].to_numpy(),
            paths=np.array(folder.paths, dtype=np.str_),
            labels=np.array([label or "" for label in folder.labels], dtype=np.str_),
        )


def write_parquet(folder: EmbeddingFolder, output: Path) -> None:
    """Write one row per image: id, path, label, a box if any has one, and the embedding as fixed_size_list<float32>."""
    import pyarrow as pa
    from pyarrow import parquet

    column = pa.field("embedding", pa.list_(pa.float32(), folder.points.shape[1]))
    schema = folder.items.schema.append(column)
    with atomic_write(output) as partial, parquet.ParquetWriter(partial, schema) as writer:
        for number, block in enumerate(folder.blocks()):
            values = pa.FixedSizeListArray.from_arrays(pa.array(block.numpy().ravel()), block.shape[1])
            rows = folder.items.slice(number * BLOCK_ROWS, len(block))
            writer.write_table(rows.append_column(column, values))


def write_tensorboard(folder: EmbeddingFolder, tensors: Path, metadata: Path, config: Path) -> None:
    """Write a log folder for the embedding projector, with labels and paths; ids and boxes are left out."""
    tensors.parent.mkdir(exist_ok=True)
    rows = [("label", "path"), *zip(folder.labels, folder.paths, strict=True)]
    lines = ["\t".join(re.sub(r"[\t\r\n]", " ", cell or "") for cell in row) for row in rows]
    count, dim = folder.points.shape
    shape = f"  tensor_shape: {count}\n  tensor_shape: {dim}\n"
    paths = f'  tensor_path: "{tensors.name}"\n  metadata_path: "{metadata.name}"\n}}\n'
    # the configuration is renamed first: by it the next export knows the folder after a kill; then the largest file
    with (
        atomic_write(metadata) as metadata_path,
        atomic_write(tensors) as tensors_path,
        atomic_write(config) as config_path,
    ):
        with tensors_path.open("wb") as file:
            for block in folder.blocks():
                file.write(block.numpy().astype("<f4").tobytes())
        metadata_path.write_text("\n".join([*lines, ""]), encoding="utf-8")
        config_path.write_text('embeddings {\n  tensor_name: "embeddings"\n' + shape + paths, encoding="utf-8")


def write_faiss(
    folder: EmbeddingFolder, output: Path, items: Path, manifest: Path, precision: IndexPrecision = "fp32"
) -> None:
    """Write an index over the manifold's index vectors; position i of the index is id i of the items.

    It is an IndexFlatIP of float32. On the sphere also an IndexScalarQuantizer of ``fp16`` or ``int8`` (256 steps
    between the smallest and the largest value of each coordinate), or an IndexBinaryFlat of the signs (``binary``: a
    bit is set for a coordinate of at least 0, in the order of ``numpy.packbits``). Elsewhere an index vector holds a
    norm, whose rounding would change the order of neighbors.
    """
    import faiss

    manifold = folder.manifold
    if precision != "fp32" and not isinstance(manifold, Sphere):
        raise UserError(
            f"export: --precision {precision} applies to embeddings on the sphere, and {folder.path} has a manifold "
            "whose vectors hold a norm, which must not be rounded"
        )
    index: Any = None
    for block in folder.blocks():
        vectors = manifold.index_vectors(block, "gallery").detach()
        index = index or _new_index(folder, vectors.shape[1], precision)
        index.add(pack(vectors.numpy()) if precision == "binary" else vectors.numpy())
    if index is None:
        raise UserError(f"{folder.path}: there are no embeddings to index")
    described: dict[str, Any] = {**manifold.index_form(), "type": type(index).__name__, "dim": index.d}
    fields: dict[str, Any] = {**dict(folder.manifest), "index": FaissIndex(**described), "checksums": None}
    # the index is renamed first: until its gigabytes are on the disk, a kill leaves the files of an earlier one
    with (
        writing(output, RuntimeError),
        atomic_write(manifest) as manifest_path,
        atomic_write(items) as items_path,
        atomic_write(output) as index_path,
    ):
        with index_path.open("wb") as file:  # FAISS ignores a full disk and would leave half an index
            write = faiss.write_index_binary if precision == "binary" else faiss.write_index
            write(index, faiss.PyCallbackIOWriter(file.write))  # pyright: ignore[reportAttributeAccessIssue]
        shutil.copyfile(folder.path / "items.parquet", items_path)
        manifest_path.write_text(FaissManifest(**fields).text(), encoding="utf-8")


def _new_index(folder: EmbeddingFolder, dim: int, precision: IndexPrecision) -> Any:
    """Return an index without vectors; the ranges of int8 are those of the embeddings."""
    import faiss

    if precision == "fp32":
        return faiss.IndexFlatIP(dim)
    if precision == "binary":
        return faiss.IndexBinaryFlat(8 * -(-dim // 8))
    bits = {"fp16": faiss.ScalarQuantizer.QT_fp16, "int8": faiss.ScalarQuantizer.QT_8bit}[precision]
    index = faiss.IndexScalarQuantizer(dim, bits, faiss.METRIC_INNER_PRODUCT)
    index.train(np.stack([folder.points.min(0), folder.points.max(0)]))
    return index


def pack(vectors: NDArray[np.float32]) -> NDArray[np.uint8]:
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
    query_vectors = pack(queries) if precision == "binary" else queries
    retrieved = index.search(query_vectors, count)[1]
    _, nearest = faiss.knn(queries, points, count, metric=faiss.METRIC_INNER_PRODUCT)  # without a copy of the points
    # an image may come after others that are equal to it
    nearest_sets, retrieved_sets = (
        [{*[other for other in line if other != row][: count - 1]} for line, row in zip(lists, rows, strict=True)]
        for lists in (nearest, retrieved)
    )
    share = np.mean([len(left & right) for left, right in zip(nearest_sets, retrieved_sets, strict=True)]) / (count - 1)
    return f"{saved}; it finds {share:.3f} of the {count - 1} nearest of {len(rows)} images of the index"


@dataclass(frozen=True)
class Format:
    """A file format of embeddings."""

    file_name: str
    """Default name of the output in a folder of embeddings."""
    write: Callable[..., None]
    """Called with an `EmbeddingFolder` and the files to write, each of which it writes atomically."""
    files: Callable[[Path], list[Path]] = lambda output: [output]
    """Returns the files of an output."""


FORMATS: dict[str, Format] = {
    "faiss": Format(
        "index.faiss",
        write_faiss,
        lambda output: [output, *(output.with_name(f"{output.name}.{end}") for end in ("items.parquet", "json"))],
    ),
    "parquet": Format("embeddings.parquet", write_parquet),
    "npz": Format("embeddings.npz", write_npz),
    "tensorboard": Format(
        "tensorboard",
        write_tensorboard,
        lambda output: [output / name for name in ("tensors.bytes", "metadata.tsv", PROJECTOR)],
    ),
}
"""The formats by their names, those of `EmbeddingFormat`."""


def check_output(format: EmbeddingFormat, output: Path, data: Sequence[Path]) -> None:  # noqa: A002
    """Check that an output may be written, see `check_file`; ``data`` are folders that it must not lie in."""
    if format == "tensorboard":
        check_folder(output, "TensorBoard's projector", PROJECTOR, sources=data)
        return
    for path in FORMATS[format].files(output):
        check_file(path, sources=data)


def export_embeddings(
    folder: EmbeddingFolder,
    format: EmbeddingFormat,  # noqa: A002
    output: Path,
    **options: IndexPrecision,
) -> list[Path]:
    """Write embeddings with their ids, paths and labels, atomically, and return the files.

    Args:
        output: the file to write, or the folder for tensorboard.
        options: the ``precision`` of the vectors of a ``faiss`` index, see `write_faiss`.
    """
    files = FORMATS[format].files(output)
    folder.check_points()  # nothing is written if a point is invalid
    with writing(output):
        FORMATS[format].write(folder, *files, **options)
    return files
