"""Export the model of a run, or a folder of embeddings, by the name of the format: what ``dmlkit export`` does."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast, get_args

from dmlkit.distributed.launch import start_fabric
from dmlkit.embedding.folder import EmbeddingFolder
from dmlkit.embedding.trained import load_model
from dmlkit.errors import UserError
from dmlkit.export.embeddings import FILE_NAMES as EMBEDDING_FILES
from dmlkit.export.embeddings import EmbeddingFormat, check_embeddings_output, export_embeddings
from dmlkit.export.model import FILE_NAMES as MODEL_FILES
from dmlkit.export.model import ModelFormat, ModelManifest, beside, check_model_output, export_model
from dmlkit.run_folder.folder import CheckpointName, RunFolder
from dmlkit.run_folder.threshold import threshold_of


@dataclass(frozen=True)
class Exported:
    """What was written.

    Args:
        files: the export, and what stands beside it.
        model: of a model, its manifest.
    """

    files: list[Path]
    model: ModelManifest | None = None


def export(
    source: Path,
    format: ModelFormat | EmbeddingFormat,  # noqa: A002
    *,
    output: Path | None = None,
    checkpoint: CheckpointName | None = None,
    overrides: Sequence[str] = (),
) -> Exported:
    """Export a run's model, or embeddings, for other programs.

    Args:
        source: a run, for ``safetensors``, ``onnx`` and ``torch-export``; a folder of embeddings for the others.
        format: one of `ModelFormat` or `EmbeddingFormat`.
        output: the file to write (a folder for tensorboard); by default in the source.
        checkpoint: of a run, which weights.
        overrides: ``key=value`` each, of a run's dataset, which may have moved: its images check the export.

    Raises:
        UserError: the format is not for such a source, ``output`` is somebody else's, or see `export_model` and
            `export_embeddings`.
    """
    if format in get_args(ModelFormat):
        kind = cast(ModelFormat, format)
        if (source / "manifest.json").exists():
            raise UserError(f"{source}: holds embeddings; --format {format} exports the model of a run")
        run = RunFolder(source)
        if output is not None:
            check_model_output(kind, output, [run.recipe_path, *map(run.checkpoint_path, ("best", "last"))])
        trained = load_model(run, start_fabric("cpu"), checkpoint, overrides=overrides, merged=False)
        output = output or run.exports / MODEL_FILES[kind]
        manifest = export_model(trained, kind, output, threshold_of(run, trained.model.fingerprint()))
        return Exported([output, beside(output)], manifest)
    if RunFolder(source).holds_run():
        raise UserError(f"{source}: is a run; --format {format} exports embeddings: run dmlkit embed {source} first")
    for name, value in (("--checkpoint", checkpoint), ("--set", overrides)):
        if value:
            raise UserError(f"export: {name} does not apply to a folder of embeddings; leave it out")
    kind = cast(EmbeddingFormat, format)
    if output is not None:
        check_embeddings_output(source, kind, output)
    return Exported(export_embeddings(EmbeddingFolder(source), kind, output or source / EMBEDDING_FILES[kind]))
