"""Export of embeddings to files: a FAISS index, Parquet, NumPy, and TensorBoard's projector."""

import shutil
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import PositiveInt

from dmlkit import __version__
from dmlkit.embedding.folder import BLOCK, EmbeddingFolder
from dmlkit.embedding.manifest import Manifest, SearchIndex
from dmlkit.errors import UserError
from dmlkit.files.atomic import atomic_write
from dmlkit.files.outputs import check_output, head_of, writing
from dmlkit.manifolds.euclidean import Euclidean
from dmlkit.manifolds.numerics.check_points import find_invalid_point

EmbeddingFormat = Literal["faiss", "parquet", "npz", "tensorboard"]
FILE_NAMES: dict[EmbeddingFormat, str] = {
    "faiss": "index.faiss",
    "parquet": "embeddings.parquet",
    "npz": "embeddings.npz",
    "tensorboard": "tensorboard",
}


def export_embeddings(folder: EmbeddingFolder, format: EmbeddingFormat, output: Path) -> list[Path]:  # noqa: A002
    """Write embeddings with their ids, paths and labels.

    Args:
        folder: the embeddings.
        format: ``faiss`` (exact inner-product index, with its items next to it), ``parquet`` (a fixed-size-list
            column), ``npz``, or ``tensorboard`` (a folder for the embedding projector).
        output: the file to write, or the folder for tensorboard.

    Returns:
        The files that were written.

    Raises:
        UserError: an embedding is not a point of its manifold or cannot be written in this format, or the disk is full;
            no partial file is left.
    """
    folder.check_points()  # nothing is written if a point is invalid
    write = {"faiss": write_faiss, "parquet": write_parquet, "npz": write_npz, "tensorboard": write_tensorboard}
    with writing(output):
        output.parent.mkdir(parents=True, exist_ok=True)
        return write[format](folder, output)


def check_embeddings_output(folder: Path, format: EmbeddingFormat, output: Path) -> None:  # noqa: A002
    """Check that an export of a folder may be written to the given output.

    Raises:
        UserError: the output exists and was not written by such an export; see `check_output`.
    """
    sources = [folder / name for name in ("manifest.json", "embeddings.npy", "items.parquet")]
    if format == "faiss":
        check_index(output, sources)
    elif format == "tensorboard":
        check_projector(output)
    else:
        check_output(output, {"npz": is_our_npz, "parquet": is_our_parquet}[format], sources=sources)


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


def write_faiss(folder: EmbeddingFolder, output: Path) -> list[Path]:
    """Write an IndexFlatIP over the manifold's index vectors; position i of the index is id i of the items.

    ``birds.faiss`` comes with ``birds.items.parquet`` and ``birds.manifest.json``, and ``birds.2023`` with
    ``birds.2023.items.parquet`` and ``birds.2023.manifest.json``.

    Raises:
        UserError: there are no embeddings, or one has no finite vector.
    """
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
    items, manifest = companions(output)
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


def companions(index: Path) -> tuple[Path, Path]:
    """Return the paths of the items and of the manifest that belong to an index."""
    name = index.name.removesuffix(".faiss")
    return index.with_name(f"{name}.items.parquet"), index.with_name(f"{name}.manifest.json")


def check_index(output: Path, sources: Sequence[Path]) -> None:
    """Check that an index, its items and its manifest may be written.

    Raises:
        UserError: one of the files was not written by dmlkit, or belongs to an index of almost the same name.
    """
    if not output.name:
        raise UserError("--output: expected the name of a file")
    items, manifest = companions(output)
    name = output.name.removesuffix(".faiss")
    twin = output.with_name(name if output.name != name else f"{name}.faiss")
    if twin.is_file():
        raise UserError(
            f"--output {output}: {twin.name} already exists and uses the same {items.name}; choose another name"
        )
    for path in (output, items, manifest):
        check_output(path, lambda _: FaissManifest.is_at(manifest), sources=sources)


MARK = b"dmlkit"  # the comment of the archive


def write_npz(folder: EmbeddingFolder, output: Path) -> list[Path]:
    """Write arrays ``embeddings ids paths labels``, readable without pickle; a missing label is an empty string."""
    columns = {name: folder.items[name].to_pylist() for name in ("path", "label")}
    with atomic_write(output) as partial:
        with partial.open("wb") as file:
            np.savez(
                file,
                embeddings=folder.points,
                ids=folder.items["id"].to_numpy(),
                paths=np.array(columns["path"], dtype=np.str_),
                labels=np.array([label or "" for label in columns["label"]], dtype=np.str_),
            )
        with zipfile.ZipFile(partial, "a") as archive:
            archive.comment = MARK
    return [output]


def is_our_npz(path: Path) -> bool:
    """Return whether `write_npz` wrote a file."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.comment == MARK
    except zipfile.BadZipFile:
        return False


def write_parquet(folder: EmbeddingFolder, output: Path) -> list[Path]:
    """Write one row per image: id, path, label, and the embedding as fixed_size_list<float32>."""
    import pyarrow as pa
    from pyarrow import parquet

    column = pa.field("embedding", pa.list_(pa.float32(), folder.points.shape[1]))
    schema = folder.items.schema.append(column).with_metadata({"dmlkit": __version__})
    with atomic_write(output) as partial, parquet.ParquetWriter(partial, schema) as writer:
        for number, block in enumerate(folder.blocks()):
            values = pa.FixedSizeListArray.from_arrays(pa.array(block.numpy().ravel()), block.shape[1])
            rows = folder.items.slice(number * BLOCK, len(block))
            writer.write_table(rows.append_column(column, values))
    return [output]


def is_our_parquet(path: Path) -> bool:
    """Return whether `write_parquet` wrote a file."""
    import pyarrow as pa
    from pyarrow import parquet

    try:
        return b"dmlkit" in (parquet.read_schema(path).metadata or {})
    except pa.ArrowInvalid:
        return False


FILES = ("tensors.bytes", "metadata.tsv", "projector_config.pbtxt")
BEGINNING = 'embeddings {\n  tensor_name: "embeddings"\n'  # of the configuration


def write_tensorboard(folder: EmbeddingFolder, output: Path) -> list[Path]:
    """Write a log folder for TensorBoard's embedding projector."""
    output.mkdir(parents=True, exist_ok=True)
    tensors, metadata, config = (output / name for name in FILES)
    rows = zip(folder.items["label"].to_pylist(), folder.items["path"].to_pylist(), strict=True)
    cells = [[str(cell or "").replace("\t", " ").replace("\n", " ") for cell in row] for row in rows]
    count, dim = folder.points.shape
    shape = f"  tensor_shape: {count}\n  tensor_shape: {dim}\n"
    paths = f'  tensor_path: "{tensors.name}"\n  metadata_path: "{metadata.name}"\n}}\n'
    # the configuration is renamed first, so that files left by a kill are recognized as dmlkit's
    with (
        atomic_write(tensors) as tensors_path,
        atomic_write(metadata) as metadata_path,
        atomic_write(config) as config_path,
    ):
        with tensors_path.open("wb") as file:
            for block in folder.blocks():
                file.write(block.numpy().astype("<f4").tobytes())
        text = "".join("\t".join(row) + "\n" for row in [["label", "path"], *cells])
        metadata_path.write_text(text, encoding="utf-8")
        config_path.write_text(BEGINNING + shape + paths, encoding="utf-8")
    return [tensors, metadata, config]


def check_projector(output: Path) -> None:
    """Check that the projector's files may be written into a folder.

    Raises:
        UserError: it is not a folder, or has such files that dmlkit did not write.
    """
    if output.exists() and not output.is_dir():
        raise UserError(f"--output {output}: is a file; expected a folder for TensorBoard's projector")
    config = output / FILES[-1]
    ours = config.is_file() and head_of(config).startswith(BEGINNING.encode())
    for name in FILES:
        check_output(output / name, lambda _: ours)
