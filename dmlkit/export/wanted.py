"""What is exported, and in which format. It imports no torch, for the help of the command."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

ModelFormat = Literal["safetensors", "onnx", "torch-export", "hub"]
"""Formats in which dmlkit export writes a model; the others are of embeddings."""
ModelInput = Literal["images", "squares", "tracker", "normalized"]
"""What an exported model takes: images of any size, or squares that are already resized and cropped. Their pixels are
uint8 for ``squares``, and float32 as trackers give them otherwise: in 0..1, or normalized by ImageNet's statistics."""
ModelPrecision = Literal["fp32", "fp16", "int8"]
"""Precision of the weighted layers of an exported ONNX model."""
IndexPrecision = Literal["fp32", "fp16", "int8", "binary"]
"""Precision of the vectors of an exported FAISS index."""
EmbeddingFormat = Literal["faiss", "parquet", "npz", "tensorboard"]
"""Files of embeddings, each written by a function of `dmlkit.export.formats`."""
StoreFormat = Literal["lancedb", "qdrant", "pgvector"]
"""Databases of embeddings."""
MODEL_FORMATS: tuple[ModelFormat, ...] = get_args(ModelFormat)
STORES: tuple[StoreFormat, ...] = get_args(StoreFormat)
PROGRAMS: tuple[ModelFormat, ...] = ("onnx", "torch-export")
"""Formats with the computation, not only the weights."""
FLOATS: Mapping[str, tuple[Sequence[float], Sequence[float]]] = {
    "tracker": ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
    "normalized": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}
"""Mean and standard deviation of red, green and blue in 0..1 by which squares of float32 are normalized."""


@dataclass(frozen=True)
class WantedModel:
    """Which model of a run is exported, and in what form: the options of ``dmlkit export``."""

    takes: Annotated[
        ModelInput | None,
        "INPUT",
        "What the exported model takes: images of any size, or squares, already resized and cropped, in batches; for "
        "trackers as float32: tracker (0..1, as in Ultralytics) or normalized (as in BoxMOT). Default: images.",
    ] = None
    dims: Annotated[
        int | None, "N", "Export a model that returns the first N coordinates, e.g. of a run with the loss matryoshka."
    ] = None
    precision: Annotated[
        IndexPrecision | None,
        "PRECISION",
        "Precision of an onnx model: fp32, fp16, or int8, whose ranges come from training images. Of a faiss index on "
        "the sphere: fp32, fp16, int8 or binary. Default: fp32.",
    ] = None
    license: Annotated[
        str | None, "NAME", "License in the model card of --format hub, e.g. apache-2.0. Default: unknown."
    ] = None
    checkpoint: Literal["last", "best", "pretrained"] | None = None
    overrides: Sequence[str] = ()
    """Changes of a run's dataset, which may have moved, each ``key=value``; its images check the export."""


AS_TRAINED = WantedModel()
"""The model of a run as `dmlkit train` chose it."""
