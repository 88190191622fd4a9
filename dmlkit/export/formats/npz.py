"""NumPy arrays in one file."""

from pathlib import Path

import numpy as np

from dmlkit.export.formats.base import Format
from dmlkit.files.atomic import atomic_write
from dmlkit.vectors.folder import EmbeddingFolder


class Npz(Format, name="npz", file_name="embeddings.npz"):
    """Arrays ``embeddings ids paths labels``, readable without pickle; a missing label is an empty string."""

    def write(self, folder: EmbeddingFolder, output: Path) -> list[Path]:
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
