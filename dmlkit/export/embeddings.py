"""Export embeddings to formats that vector databases and other programs read."""

from pathlib import Path
from typing import Literal

from dmlkit.embedding.folder import EmbeddingFolder
from dmlkit.export.faiss import check_index, write_faiss
from dmlkit.export.npz import is_our_npz, write_npz
from dmlkit.export.parquet import is_our_parquet, write_parquet
from dmlkit.export.tensorboard import check_projector, write_tensorboard
from dmlkit.files.outputs import check_output, writing

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
        format: ``faiss`` (exact inner-product index, items beside it), ``parquet`` (a fixed-size-list column),
            ``npz``, or ``tensorboard`` (a folder for the embedding projector).
        output: the file, or for tensorboard the folder, to write.

    Returns:
        What was written.

    Raises:
        UserError: an embedding is no point of its manifold, or cannot be written in this format, or the disk is full;
            nothing is left half written.
    """
    folder.check_points()  # of a faulty one nothing is written
    write = {"faiss": write_faiss, "parquet": write_parquet, "npz": write_npz, "tensorboard": write_tensorboard}
    with writing(output):
        output.parent.mkdir(parents=True, exist_ok=True)
        return write[format](folder, output)


def check_embeddings_output(folder: Path, format: EmbeddingFormat, output: Path) -> None:  # noqa: A002
    """Make sure that an export of a folder may be written where the user says.

    Raises:
        UserError: something is there that such an export has not written; see `check_output`.
    """
    sources = [folder / name for name in ("manifest.json", "embeddings.npy", "items.parquet")]
    if format == "faiss":
        check_index(output, sources)
    elif format == "tensorboard":
        check_projector(output)
    else:
        check_output(output, {"npz": is_our_npz, "parquet": is_our_parquet}[format], sources=sources)
