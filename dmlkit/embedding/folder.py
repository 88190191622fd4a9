"""A folder of embeddings that `dmlkit embed` wrote."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import TypeAdapter

from dmlkit.component import one_of
from dmlkit.errors import UserError
from dmlkit.manifolds.base import Manifold, ManifoldConfig

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
