"""Export the model of a run, or a folder of embeddings, by the name of the format: what ``dmlkit export`` does."""

from collections.abc import Sequence
from dataclasses import dataclass
from os.path import commonpath
from pathlib import Path
from typing import Literal, cast, get_args

from dmlkit.distributed.launch import start_fabric
from dmlkit.embedding.folder import EmbeddingFolder
from dmlkit.embedding.in_memory import Bar, no_bar
from dmlkit.embedding.trained import load_model
from dmlkit.errors import UserError
from dmlkit.export.embeddings import FILE_NAMES as EMBEDDING_FILES
from dmlkit.export.embeddings import EmbeddingFormat, check_embeddings_output, export_embeddings
from dmlkit.export.lancedb import write_lancedb
from dmlkit.export.model import FILE_NAMES as MODEL_FILES
from dmlkit.export.model import ModelFormat, ModelManifest, check_model_output, export_model, manifest_path
from dmlkit.export.pgvector import write_pgvector
from dmlkit.export.qdrant import write_qdrant
from dmlkit.export.store import Destination, is_address
from dmlkit.files.outputs import check_place
from dmlkit.run_folder.folder import CheckpointName, RunFolder
from dmlkit.run_folder.threshold import threshold_of

StoreFormat = Literal["lancedb", "qdrant", "pgvector"]
TABLE = "embeddings"  # where nothing is said


def export_to_store(
    folder: EmbeddingFolder,
    format: StoreFormat,  # noqa: A002
    target: str | None,
    table: str | None,
    *,
    overwrite: bool = False,
    bar: Bar = no_bar,
) -> tuple[Destination, list[str]]:
    """Write embeddings with their ids, paths and labels as a table, whole or not at all.

    Args:
        folder: the embeddings.
        format: ``lancedb``, ``qdrant`` (a collection) or ``pgvector``.
        target: a folder, or the address of a server; by default a folder of the format's name in the source.
        table: its name, by default `TABLE`.
        overwrite: replace the table, if this command has written it.
        bar: shows the rows.

    Returns:
        Where the table is, and what to know of it.

    Raises:
        UserError: an embedding is no point of its manifold, or a table is there already, or the store refuses to write.
    """
    folder.check_points()  # of a faulty one nothing is written
    write = {"lancedb": write_lancedb, "qdrant": write_qdrant, "pgvector": write_pgvector}
    if target is None or not is_address(target):
        target = str(folder.path / format if target is None else Path(target))
    to = Destination(target, TABLE if table is None else table, overwrite, bar)
    return to, write[format](folder, to)


@dataclass(frozen=True)
class Exported:
    """What was written.

    Args:
        written: the export, and what stands beside it.
        model: of a model, its manifest.
        notes: what to know of a table in a store.
    """

    written: list[Path | Destination]
    model: ModelManifest | None = None
    notes: Sequence[str] = ()


def export(
    source: Path,
    format: ModelFormat | EmbeddingFormat | StoreFormat,  # noqa: A002
    *,
    output: Path | str | None = None,
    table: str | None = None,
    overwrite: bool = False,
    checkpoint: CheckpointName | None = None,
    overrides: Sequence[str] = (),
    bar: Bar = no_bar,
) -> Exported:
    """Export a run's model, or embeddings, for other programs.

    Args:
        source: a run, for ``safetensors``, ``onnx`` and ``torch-export``; a folder of embeddings for the others.
        format: one of `ModelFormat`, `EmbeddingFormat` or `StoreFormat`.
        output: the file to write (a folder for tensorboard, lancedb and qdrant), or the address of a store; by default
            in the source.
        table: of a store, see `export_to_store`.
        overwrite: replace the table of a store.
        checkpoint: of a run, which weights.
        overrides: ``key=value`` each, of a run's dataset, which may have moved: its images check the export.
        bar: shows the rows that go to a store.

    Raises:
        UserError: the format is not for such a source, ``output`` is somebody else's, or see `export_model`,
            `export_embeddings` and `export_to_store`.
    """
    is_store = format in get_args(StoreFormat)
    for name, value in (("--table", table is not None), ("--overwrite", overwrite)):
        if value and not is_store:
            raise UserError(f"export: {name} applies to a store ({', '.join(get_args(StoreFormat))}); leave it out")
    if output is not None and not str(output):  # which a store and TensorBoard would take for the current folder
        raise UserError("export: --output is empty; expected a file, a folder or an address, or leave it out")
    if output is not None and not is_store and is_address(str(output)):
        raise UserError(f"--output: is an address, but --format {format} writes a file; name one")
    path = None if output is None or is_store else Path(output)
    if format in get_args(ModelFormat):
        kind = cast(ModelFormat, format)
        if (source / "manifest.json").exists():
            raise UserError(f"{source}: holds embeddings; --format {format} exports the model of a run")
        run = RunFolder(source)
        if path is not None:
            check_place(path, [run.recipe().dataset.data_root])
            check_model_output(kind, path, [run.recipe_path, *map(run.checkpoint_path, ("best", "last"))])
        trained = load_model(run, start_fabric("cpu"), checkpoint, overrides=overrides, merged=False)
        path = path or run.exports / MODEL_FILES[kind]
        manifest = export_model(trained, kind, path, threshold_of(run, trained.model.fingerprint()))
        return Exported([path, manifest_path(path)], manifest)
    if RunFolder(source).holds_run():
        raise UserError(f"{source}: is a run; --format {format} exports embeddings: run dmlkit embed {source} first")
    for name, value in (("--checkpoint", checkpoint), ("--set", overrides)):
        if value:
            raise UserError(f"export: {name} does not apply to a folder of embeddings; leave it out")
    if output is not None and not is_address(str(output)):
        check_place(Path(output), data_of(EmbeddingFolder(source)))
    if is_store:
        folder, store = EmbeddingFolder(source), cast(StoreFormat, format)
        target = None if output is None else str(output)
        to, notes = export_to_store(folder, store, target, table, overwrite=overwrite, bar=bar)
        return Exported([to], notes=notes)
    kind = cast(EmbeddingFormat, format)
    if path is not None:
        check_embeddings_output(source, kind, path)
    return Exported([*export_embeddings(EmbeddingFolder(source), kind, path or source / EMBEDDING_FILES[kind])])


def data_of(folder: EmbeddingFolder) -> list[Path]:
    """The folders that hold the images of embeddings; none where these lie all over the working folder, or above it."""
    classes = {Path(path).absolute().parent for path in folder.items["path"].to_pylist()}
    found = [Path(folder.manifest.source).absolute(), *([Path(commonpath(classes))] if classes else [])]
    return [root for root in found if not Path.cwd().is_relative_to(root)]
