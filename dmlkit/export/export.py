"""Export of the model of a run, or of a folder of embeddings, by the name of the format."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from os.path import commonpath
from pathlib import Path
from typing import cast

from dmlkit.backbones.tuning import LoRAConfig
from dmlkit.backbones.weights import license_words
from dmlkit.distributed.launch import start_ranks
from dmlkit.errors import UserError, counted
from dmlkit.export.databases import Destination, is_address, write_lancedb, write_pgvector, write_qdrant
from dmlkit.export.formats import FORMATS, check_output, cost_of, export_embeddings
from dmlkit.export.hub import export_hub
from dmlkit.export.model import FILE_NAMES as MODEL_FILES
from dmlkit.export.model import Parity, export_model, manifest_path
from dmlkit.export.precision import lower
from dmlkit.export.wanted import (
    AS_TRAINED,
    FLOATS,
    MODEL_FORMATS,
    PROGRAMS,
    STORES,
    EmbeddingFormat,
    ModelFormat,
    ModelPrecision,
    StoreFormat,
    WantedModel,
)
from dmlkit.files.escape import command_word
from dmlkit.files.outputs import check_file, check_place
from dmlkit.files.source import NAMES, check_options, kind_of, model_name, require_path, require_run
from dmlkit.run_folder.folder import RunFolder
from dmlkit.run_folder.threshold import threshold_of
from dmlkit.vectors.folder import EmbeddingFolder
from dmlkit.vectors.progress_bar import Bar, no_bar
from dmlkit.vectors.trained import load_model, recipe_of, shortened

OPTIONS: dict[str, tuple[str, ...]] = {
    "--table": STORES,
    "--overwrite": STORES,
    "--input": PROGRAMS,
    "--dims": PROGRAMS,
    "--precision": ("onnx", "faiss"),
    "--license": ("hub",),
}
"""The formats that each option applies to."""
WITH_BOXES = ("faiss", "parquet")
"""The formats of embeddings that keep the boxes of images."""


def export_to_store(
    folder: EmbeddingFolder,
    format: StoreFormat,  # noqa: A002
    target: str | None,
    table: str | None,
    *,
    overwrite: bool = False,
    bar: Bar = no_bar,
) -> tuple[Destination, list[str]]:
    """Write embeddings with their ids, paths and labels as a table, atomically; return it with notes about it.

    The target is a folder, or the address of a server; by default a folder in the source, named after the format.
    """
    folder.check_points()  # nothing is written if a point is invalid
    write = {"lancedb": write_lancedb, "qdrant": write_qdrant, "pgvector": write_pgvector}
    if target is None or not is_address(target):
        target = str(folder.path / format if target is None else Path(target))
    to = Destination(target, "embeddings" if table is None else table, overwrite, bar)
    return to, write[format](folder, to)


@dataclass(frozen=True)
class Exported:
    """The result of an export."""

    written: list[Path | Destination]  # the export and the files that belong to it
    agreement: str = ""  # of an exported model with that of the run
    notes: Sequence[str] = ()  # on a table in a store, what is missing in a folder for the Hub, or a license


def export(
    source: Path,
    format: ModelFormat | EmbeddingFormat | StoreFormat,  # noqa: A002
    *,
    output: Path | str | None = None,
    table: str | None = None,
    overwrite: bool = False,
    model: WantedModel = AS_TRAINED,
    bar: Bar = no_bar,
) -> Exported:
    """Export a run's model, or embeddings, for other programs.

    Args:
        source: a run for ``safetensors``, ``onnx``, ``torch-export`` and ``hub``; embeddings for other formats.
        output: the file to write (a folder for hub, tensorboard, lancedb and qdrant), or the address of a store.
            Default: a name in the source.
    """
    _check_options(source, format, model, {"--table": table, "--overwrite": overwrite})
    if output is not None and not str(output):  # a store and TensorBoard would write into the current folder
        raise UserError("export: --output is empty; expected a file, a folder or an address")
    if output is not None and format not in STORES and is_address(str(output)):
        raise UserError(f"--output: got an address, but --format {format} writes a file; give a file name")
    path = None if output is None or is_address(str(output)) else Path(output)
    if format in MODEL_FORMATS:
        exported, name = _export_run(source, format, path, model), RunFolder(source).recipe().backbone.license()
        weights = [f"pretrained weights: {license_words(name)}"] if name else []
        return replace(exported, notes=[*exported.notes, *weights])
    folder = EmbeddingFolder(source)
    boxes = 0 if format in WITH_BOXES else sum(box is not None for box in folder.boxes)
    left_out = [f"{counted(boxes, 'box is', 'boxes are')} left out; --format parquet keeps them"] if boxes else []
    if format in STORES:
        if path is not None:
            check_place(path, data_of(folder))
        target = None if output is None else str(output)
        to, notes = export_to_store(folder, format, target, table, overwrite=overwrite, bar=bar)
        return Exported([to], notes=[*notes, *left_out])
    file_format = cast(EmbeddingFormat, format)
    if path is not None:
        check_output(file_format, path, data_of(folder))
    name, precision = Path(FORMATS[format].file_name), model.precision or "fp32"
    if precision == "fp32":
        return Exported([*export_embeddings(folder, file_format, path or source / name)], notes=left_out)
    path = path or source / name.with_suffix(f".{precision}{name.suffix}")
    written = export_embeddings(folder, file_format, path, precision=precision)
    return Exported([*written], notes=[cost_of(folder, path, precision)])


def _export_run(
    source: Path,
    format: ModelFormat,  # noqa: A002
    path: Path | None,
    model: WantedModel,
) -> Exported:
    run, takes = RunFolder(source), model.takes
    loaded = partial(load_model, run, start_ranks("cpu"), model.checkpoint, overrides=model.overrides)
    if format in ("safetensors", "hub") and (run.model or model.checkpoint == "pretrained"):
        untrained = run.model or "--checkpoint pretrained"
        raise UserError(f"export: {untrained} has no trained weights; use --format {' or '.join(PROGRAMS)}")
    if path is not None:
        check_place(path, [recipe_of(run, model.overrides).dataset.data_root])
    elif run.model:
        raise UserError(f"export: {run.model} has no folder of its own; name the file with --output")
    merged = loaded()
    if format == "hub":
        path = path or run.export_of(MODEL_FILES[format], merged.checkpoint)
        unmerged = loaded(merged=False) if isinstance(merged.recipe.backbone.tuning, LoRAConfig) else None
        parity, reason = export_hub(run, merged, path, model.license, unmerged)
        notes = [f"no adapter for peft: {reason}"] if reason else []
        return Exported([path], _agreement(parity, f"{merged.samples.name}s"), notes)
    precision = model.precision or "fp32"
    if path is not None:
        for file in (path, manifest_path(path)):
            check_file(file)
    trained = loaded(merged=False)
    has_pixels = trained.samples.has_pixels and trained.recipe.transform is not None
    if takes and not has_pixels:
        raise UserError(f"export: --input {takes} applies to images, but the model takes {trained.samples.describe()}")
    name = MODEL_FILES[format] if precision == "fp32" else f"model.{precision}.onnx"
    path = path or run.export_of(name, merged.checkpoint, model.dims)
    labels = run.training_classes()
    takes = takes or ("images" if has_pixels and format in PROGRAMS else "squares")
    if model.dims is not None:
        trained, merged = shortened(trained, model.dims), shortened(merged, model.dims)
    trained = replace(trained, recorded=merged.fingerprint)  # its low-rank updates are added in the export
    lowered = None if precision == "fp32" else lower(run, merged, cast(ModelPrecision, precision), start_ranks("cpu"))
    fingerprint = (lowered.trained if lowered else trained).fingerprint
    threshold = None if model.dims is not None else threshold_of(run, fingerprint)  # that of the whole model
    manifest = export_model(trained, format, path, threshold, takes=takes, labels=labels, lowered=lowered)
    if lowered:
        return Exported([path, manifest_path(path)], lowered.report, lowered.notes)
    agreement = _agreement(manifest.parity, manifest.input.partition(":")[0])
    return Exported([path, manifest_path(path)], agreement)


def _agreement(parity: Parity, kind: str) -> str:
    return f"agrees with the run on {parity.images} {kind} to {parity.largest_difference:.0e}"


def data_of(folder: EmbeddingFolder) -> list[Path]:
    """Return the folders of the images of embeddings, except folders that contain the working folder."""
    classes = {Path(path).absolute().parent for path in folder.paths}
    roots = [Path(folder.manifest.source).absolute(), *([Path(commonpath(classes))] if classes else [])]
    return [root for root in roots if not Path.cwd().is_relative_to(root)]


def _check_options(source: Path, export_format: str, model: WantedModel, options: dict[str, object]) -> None:
    """Check that a source can be exported in a format with the given options; None and False are none."""
    keys = {"--input": model.takes, "--dims": model.dims, "--precision": model.precision, "--license": model.license}
    for name in (name for name, value in (options | keys).items() if value is not None and value is not False):
        formats = OPTIONS[name]
        if export_format not in formats:
            words = f"stores ({', '.join(formats)})" if formats == STORES else " and ".join(formats)
            raise UserError(f"export: {name} applies only to {words}; remove this option")
    if export_format == "torch-export" and model.takes in FLOATS:
        raise UserError(f"export: --input {model.takes} applies only to onnx, which trackers load; use --format onnx")
    if export_format == "onnx" and model.precision == "binary":
        raise UserError("export: --precision binary applies only to faiss; an onnx model has fp32, fp16 or int8")
    _require_exportable(source, export_format)
    if export_format not in MODEL_FORMATS:
        check_options(source, "embeddings", {"--checkpoint": model.checkpoint, "--set": list(model.overrides)})


def _require_exportable(path: Path, export_format: str) -> None:
    """Raise a `UserError` unless a format exports a path: a run, or a folder of embeddings."""
    kind = kind_of(path) if path.exists() or model_name(path) else "images"
    if export_format in MODEL_FORMATS:
        if kind not in ("run", "images"):
            raise UserError(
                f"{path}: expected a run, since --format {export_format} exports a model; got {NAMES[kind]}"
            )
        require_run(path)
    elif kind in ("run", "gallery", "array"):
        hint = f": run dmlkit embed {command_word(path)} FOLDER first" if kind == "run" else ""
        raise UserError(f"{path}: is {NAMES[kind]}; --format {export_format} exports a folder of embeddings{hint}")
    elif not (path / "manifest.json").exists():
        require_path(path, "a folder of embeddings")
        raise UserError(f"{path / 'manifest.json'}: missing; expected a manifest of embeddings that dmlkit wrote")
