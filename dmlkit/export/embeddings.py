"""Export embeddings to formats that vector databases and other programs read."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import TypeAdapter

from dmlkit.component import one_of
from dmlkit.errors import UserError
from dmlkit.manifolds.base import Manifold, ManifoldConfig
from dmlkit.run_folder import atomic_write, write_json

EmbeddingFormat = Literal["faiss", "parquet", "npz", "tensorboard"]
FILE_NAMES: dict[EmbeddingFormat, str] = {
    "faiss": "index.faiss",
    "parquet": "embeddings.parquet",
    "npz": "embeddings.npz",
    "tensorboard": "tensorboard",
}
BLOCK = 65_536  # rows handled at once: 128 MB at 512 dimensions


class EmbeddingFolder:
    """Embeddings that ``dmlkit embed`` wrote.

    Args:
        path: the folder.

    Raises:
        UserError: files are missing or do not belong together.
    """

    def __init__(self, path: Path) -> None:
        import json

        from pyarrow import parquet

        self.path = path
        try:
            self.manifest: dict[str, Any] = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
            self.points: np.ndarray = np.load(path / "embeddings.npy", mmap_mode="r", allow_pickle=False)
            self.items: Any = parquet.read_table(path / "items.parquet")
        except FileNotFoundError as error:
            raise UserError(f"{error.filename}: missing; expected a folder that dmlkit embed wrote") from None
        except ValueError as error:  # of JSON, NumPy and Parquet
            raise UserError(f"{path}: cannot read these embeddings: {error}") from error
        if len(self.points) != self.items.num_rows:
            raise UserError(
                f"{path}: embeddings.npy has {len(self.points)} rows and items.parquet {self.items.num_rows}; "
                "they must be of one run of dmlkit embed"
            )

    def manifold(self) -> Manifold:
        """The geometry of the points."""
        adapter: TypeAdapter[ManifoldConfig] = TypeAdapter(Annotated[ManifoldConfig, one_of])
        return adapter.validate_python(self.manifest["manifold"]).build(self.manifest["features"])

    def blocks(self) -> Iterator[torch.Tensor]:
        """The points, a bounded number of rows at a time."""
        for start in range(0, len(self.points), BLOCK):
            yield torch.from_numpy(np.array(self.points[start : start + BLOCK]))


def export_embeddings(folder: EmbeddingFolder, format: EmbeddingFormat, output: Path) -> list[Path]:  # noqa: A002
    """Write embeddings with their ids, paths and labels.

    Args:
        folder: the embeddings.
        format: ``faiss`` (exact inner-product index, items beside it), ``parquet`` (a fixed-size-list column),
            ``npz``, or ``tensorboard`` (a folder for the embedding projector).
        output: the file, or for tensorboard the folder, to write.

    Returns:
        What was written.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    write = {"faiss": write_faiss, "parquet": write_parquet, "npz": write_npz, "tensorboard": write_tensorboard}
    return write[format](folder, output)


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


def write_parquet(folder: EmbeddingFolder, output: Path) -> list[Path]:
    """One row per image: id, path, label, and the embedding as fixed_size_list<float32>."""
    import pyarrow as pa
    from pyarrow import parquet

    column = pa.field("embedding", pa.list_(pa.float32(), folder.points.shape[1]))
    schema = folder.items.schema.append(column).remove_metadata()
    with atomic_write(output) as partial, parquet.ParquetWriter(partial, schema) as writer:
        for number, block in enumerate(folder.blocks()):
            values = pa.FixedSizeListArray.from_arrays(pa.array(block.numpy().ravel()), block.shape[1])
            rows = folder.items.slice(number * BLOCK, len(block))
            writer.write_table(rows.append_column(column, values))
    return [output]


def write_npz(folder: EmbeddingFolder, output: Path) -> list[Path]:
    """Arrays ``embeddings ids paths labels``, readable without pickle; a missing label is an empty string."""
    columns = {name: folder.items[name].to_pylist() for name in ("path", "label")}
    with atomic_write(output) as partial, partial.open("wb") as file:
        np.savez(
            file,
            embeddings=folder.points,
            ids=folder.items["id"].to_numpy(),
            paths=np.array(columns["path"], dtype=np.str_),
            labels=np.array([label or "" for label in columns["label"]], dtype=np.str_),
        )
    return [output]


def write_tensorboard(folder: EmbeddingFolder, output: Path) -> list[Path]:
    """A log folder for TensorBoard's embedding projector."""
    output.mkdir(parents=True, exist_ok=True)
    tensors, metadata, config = (output / name for name in ("tensors.bytes", "metadata.tsv", "projector_config.pbtxt"))
    with atomic_write(tensors) as partial, partial.open("wb") as file:
        for block in folder.blocks():
            file.write(block.numpy().astype("<f4").tobytes())
    rows = zip(folder.items["label"].to_pylist(), folder.items["path"].to_pylist(), strict=True)
    cells = [[str(cell or "").replace("\t", " ").replace("\n", " ") for cell in row] for row in rows]
    metadata.write_text("".join("\t".join(row) + "\n" for row in [["label", "path"], *cells]), encoding="utf-8")
    count, dim = folder.points.shape
    config.write_text(
        f'embeddings {{\n  tensor_name: "embeddings"\n  tensor_shape: {count}\n  tensor_shape: {dim}\n'
        f'  tensor_path: "{tensors.name}"\n  metadata_path: "{metadata.name}"\n}}\n',
        encoding="utf-8",
    )
    return [tensors, metadata, config]
