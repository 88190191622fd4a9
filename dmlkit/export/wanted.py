"""What is exported, and in which format. It imports no torch, for the help of the command."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

ModelFormat = Literal["safetensors", "onnx", "torch-export", "hub"]
"""Formats in which dmlkit export writes a model; the others are of embeddings."""
ModelInput = Literal["images", "squares"]
"""What an exported model takes: images of any size, or squares that are already resized and cropped."""
ModelPrecision = Literal["fp32", "fp16", "int8"]
"""Precision of the weighted layers of an exported ONNX model."""
IndexPrecision = Literal["fp32", "fp16", "int8", "binary"]
"""Precision of the vectors of an exported FAISS index."""
EmbeddingFormat = Literal["faiss", "parquet", "npz", "tensorboard"]
"""Files of embeddings, each written by the file of this name in ``dmlkit/export/formats``."""
StoreFormat = Literal["lancedb", "qdrant", "pgvector"]
"""Databases of embeddings."""
MODEL_FORMATS: tuple[ModelFormat, ...] = get_args(ModelFormat)
STORES: tuple[StoreFormat, ...] = get_args(StoreFormat)
PROGRAMS: tuple[ModelFormat, ...] = ("onnx", "torch-export")
"""Formats with the computation, not only the weights."""


@dataclass(frozen=True)
class WantedModel:
    """Which model of a run is exported, and in what form.

    Args:
        overrides: changes of a run's dataset, which may have moved, each ``key=value``; its images check the export.
        takes: input of a model of images. Default: ``images`` for ``onnx`` and ``torch-export``.
        dims: number of first coordinates that the exported model returns. Default: all.
        license: identifier of the license, for the model card of ``hub``.
        precision: precision of an ``onnx`` model, or of the vectors of a ``faiss`` index, which alone may be
            ``binary``. Default: ``fp32``.
    """

    checkpoint: Literal["last", "best", "pretrained"] | None = None
    overrides: Sequence[str] = ()
    takes: ModelInput | None = None
    dims: int | None = None
    license: str | None = None
    precision: IndexPrecision | None = None

    def options(self) -> dict[str, object]:
        """Return the values by the names that they have on the command line."""
        return {
            "--checkpoint": self.checkpoint,
            "--set": list(self.overrides),
            "--input": self.takes,
            "--dims": self.dims,
            "--license": self.license,
            "--precision": self.precision,
        }


AS_TRAINED = WantedModel()
"""The model of a run as `dmlkit train` chose it."""
