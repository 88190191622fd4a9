"""The formats that dmlkit export writes, and which sources and options go with each.

It imports no torch, so that the command line refuses a wrong option at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from dmlkit.errors import UserError
from dmlkit.files.escape import command_word
from dmlkit.files.source import NAMES, check_options, kind_of, require_path, require_run

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
OPTIONS: dict[str, tuple[str, ...]] = {
    "--table": STORES,
    "--overwrite": STORES,
    "--input": PROGRAMS,
    "--dims": PROGRAMS,
    "--precision": ("onnx", "faiss"),
    "--license": ("hub",),
}
"""The formats that each option applies to; options that are not here depend on the source."""


@dataclass(frozen=True)
class WantedModel:
    """Which model of a run is exported, and in what form.

    Args:
        checkpoint: checkpoint of the run. Default: best, otherwise last.
        overrides: changes of a run's dataset, which may have moved, each ``key=value``; its images check the export.
        takes: input of a model of images. Default: ``images`` for ``onnx`` and ``torch-export``.
        dims: number of first coordinates that the exported model returns. Default: all.
        license: identifier of the license, for the model card of ``hub``.
        precision: precision of an ``onnx`` model, or of the vectors of a ``faiss`` index, which alone may be
            ``binary``. Default: ``fp32``.
    """

    checkpoint: Literal["last", "best"] | None = None
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


def check_export(source: Path, export_format: str, options: Mapping[str, object]) -> None:
    """Check that a source can be exported in a format with the given options.

    Args:
        options: value by option; an empty value is not checked.

    Raises:
        UserError: an option does not apply to the format or to the source, or the source has another format.
    """
    given = {name: value for name, value in options.items() if value}
    for name in given:
        formats = OPTIONS.get(name, (export_format,))
        if export_format not in formats:
            words = f"stores ({', '.join(formats)})" if formats == STORES else " and ".join(formats)
            raise UserError(f"export: {name} applies only to {words}; remove this option")
    if export_format == "onnx" and given.get("--precision") == "binary":
        raise UserError("export: --precision binary applies only to faiss; an onnx model has fp32, fp16 or int8")
    require_exportable(source, export_format)
    if export_format not in MODEL_FORMATS:
        check_options(source, "embeddings", {name: given.get(name) for name in ("--checkpoint", "--set")})


def require_exportable(path: Path, export_format: str) -> None:
    """Raise a `UserError` unless a format exports a path: a run, or a folder of embeddings."""
    kind = kind_of(path) if path.exists() else "images"
    if export_format in MODEL_FORMATS:
        if kind not in ("run", "images"):
            raise UserError(
                f"{path}: expected a run, since --format {export_format} exports a model; got {NAMES[kind]}"
            )
        require_run(path)
    elif kind in ("run", "gallery", "array"):
        first = f": run dmlkit embed {command_word(path)} first" if kind == "run" else ""
        raise UserError(f"{path}: is {NAMES[kind]}; --format {export_format} exports a folder of embeddings{first}")
    elif not (path / "manifest.json").exists():
        require_path(path, "a folder of embeddings")
        raise UserError(f"{path / 'manifest.json'}: missing; expected a manifest of embeddings that dmlkit wrote")
