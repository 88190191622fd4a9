"""Export embeddings to formats that vector databases and other programs read."""

from pathlib import Path
from typing import Literal

from dmlkit.embedding.folder import EmbeddingFolder
from dmlkit.export.faiss import write_faiss
from dmlkit.export.npz import write_npz
from dmlkit.export.parquet import write_parquet
from dmlkit.export.tensorboard import write_tensorboard

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
        UserError: an embedding has nan or inf, or cannot be written in this format; nothing is written.
    """
    folder.check_finite()
    output.parent.mkdir(parents=True, exist_ok=True)
    write = {"faiss": write_faiss, "parquet": write_parquet, "npz": write_npz, "tensorboard": write_tensorboard}
    return write[format](folder, output)
