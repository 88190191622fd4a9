"""``dmlkit export``."""

import sys
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, get_args

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from dmlkit.cli.console import bars, say
from dmlkit.cli.options import USE, Checkpoint, SetDataset, argument, examples, option, with_options
from dmlkit.export.wanted import (
    MODEL_FORMATS,
    PROGRAMS,
    EmbeddingFormat,
    IndexPrecision,
    ModelFormat,
    ModelInput,
    StoreFormat,
    WantedModel,
)
from dmlkit.files.source import kind_of

app = typer.Typer()


@dataclass(frozen=True)
class ExportedModelOptions:
    """Options on the model of a run that is exported, and its form; see `WantedModel`."""

    takes: Annotated[
        ModelInput | None,
        option(
            "INPUT",
            "What the exported model takes: images of any size, or squares, already resized and cropped, in "
            "batches. Default: images.",
            "--input",
        ),
    ] = None
    dims: Annotated[
        int | None,
        option(
            "N", "Export a model that returns the first N coordinates, e.g. of a run with the loss matryoshka.", min=1
        ),
    ] = None
    precision: Annotated[
        IndexPrecision | None,
        option(
            "PRECISION",
            "Precision of an onnx model: fp32, fp16, or int8, whose ranges come from training images. Of a faiss "
            "index on the sphere: fp32, fp16, int8 or binary. Default: fp32.",
        ),
    ] = None
    license_name: Annotated[
        str | None,
        option("NAME", "License in the model card of --format hub, e.g. apache-2.0. Default: unknown.", "--license"),
    ] = None
    checkpoint: Checkpoint = None
    overrides: SetDataset = None


@app.command(
    rich_help_panel=USE,
    epilog=examples(
        "dmlkit export runs/demo --format onnx",
        "dmlkit export runs/demo --format onnx --precision int8",
        "dmlkit export runs/demo --format hub --license mit -o birds-model",
        "dmlkit export embeddings/photos --format faiss --precision int8",
        "dmlkit export embeddings/photos --format pgvector -o postgresql://me@db/birds",
    ),
)
@with_options
def export(
    source: Annotated[
        Path,
        argument(
            "SOURCE",
            "Run, timm:NAME, or embeddings folder.",
            check=partial(kind_of, expected="a run or a folder of embeddings"),
        ),
    ],
    format: Annotated[  # noqa: A002
        Literal[ModelFormat, EmbeddingFormat, StoreFormat],
        option(
            "FORMAT",
            f"For a run: {', '.join(MODEL_FORMATS[:-1])} or {MODEL_FORMATS[-1]}. For embeddings: "
            f"{', '.join(get_args(EmbeddingFormat))}, or a database: {', '.join(get_args(StoreFormat))}.",
        ),
    ],
    output: Annotated[
        str | None,
        option("PATH|URL", "File or folder to write, or address of a database. Default: in SOURCE.", "--output", "-o"),
    ] = None,
    table: Annotated[
        str | None, option("NAME", "Name of the table (collection) in the database. Default: embeddings.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the table, if dmlkit wrote it.")] = False,
    *,
    model: ExportedModelOptions,
) -> None:
    """Export the model of a run, or embeddings, for other programs."""
    from dmlkit.export.export import export as export_source

    wanted = WantedModel(
        model.checkpoint, model.overrides or [], model.takes, model.dims, model.license_name, model.precision
    )
    console = Console()
    errors = Console(file=sys.stderr)  # PyTorch's exporters get another stream meanwhile
    with _tracing(errors) if format in PROGRAMS else nullcontext():
        exported = export_source(
            source, format, output=output, table=table, overwrite=overwrite, model=wanted, bar=bars(console)
        )
    if exported.agreement:
        say(console, f"{exported.written[0]}: {exported.agreement}")
    else:
        for written in exported.written:
            say(console, f"wrote {written}")
    for note in exported.notes:
        say(console, f"note: {note}")


def _tracing(console: Console) -> Progress:
    """Return what shows on a terminal that a network is traced, and for how long; nothing elsewhere."""
    text = "tracing the model, which can take minutes"
    columns = (SpinnerColumn(), TextColumn(text), TimeElapsedColumn())
    progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    progress.add_task(text)
    return progress
