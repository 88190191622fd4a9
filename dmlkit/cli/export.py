"""``dmlkit export``."""

import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, get_args

from rich.console import Console

from dmlkit.cli.console import bars, say
from dmlkit.cli.options import command
from dmlkit.export.wanted import MODEL_FORMATS, PROGRAMS, EmbeddingFormat, ModelFormat, StoreFormat, WantedModel
from dmlkit.files.source import kind_of

if TYPE_CHECKING:
    from rich.progress import Progress


@command(
    "dmlkit export runs/demo --format onnx",
    "dmlkit export runs/demo --format onnx --precision int8",
    "dmlkit export runs/demo --format hub --license mit -o birds-model",
    "dmlkit export embeddings/photos --format faiss --precision int8",
    "dmlkit export embeddings/photos --format pgvector -o postgresql://me@db/birds",
)
def export(
    source: Annotated[
        Path,
        "SOURCE",
        "Run, timm:NAME, or embeddings folder.",
        partial(kind_of, expected="a run or a folder of embeddings"),
    ],
    /,
    format: Annotated[  # noqa: A002
        Literal[ModelFormat, EmbeddingFormat, StoreFormat],
        "FORMAT",
        f"For a run: {', '.join(MODEL_FORMATS[:-1])} or {MODEL_FORMATS[-1]}. For embeddings: "
        f"{', '.join(get_args(EmbeddingFormat))}, or a database: {', '.join(get_args(StoreFormat))}.",
    ],
    output: Annotated[
        str | None, "PATH|URL", "File or folder to write, or address of a database. Default: in SOURCE."
    ] = None,
    table: Annotated[str | None, "NAME", "Name of the table (collection) in the database. Default: embeddings."] = None,
    overwrite: Annotated[bool, "Replace the table, if dmlkit wrote it."] = False,
    *,
    model: WantedModel,
) -> None:
    """Export the model of a run, or embeddings, for other programs."""
    from dmlkit.export.export import export as export_source

    with _tracing() if format in PROGRAMS else nullcontext():
        exported = export_source(
            source, format, output=output, table=table, overwrite=overwrite, model=model, bar=bars()
        )
    if exported.agreement:
        say(f"{exported.written[0]}: {exported.agreement}")
    else:
        for written in exported.written:
            say(f"wrote {written}")
    for note in exported.notes:
        say(f"note: {note}")


def _tracing() -> "Progress":
    """Return what shows on a terminal that a network is traced, and for how long; nothing elsewhere."""
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(file=sys.stderr)  # PyTorch's exporters get another stream meanwhile
    columns = (SpinnerColumn(), TextColumn("tracing the model, which can take minutes"), TimeElapsedColumn())
    progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    progress.add_task("")
    return progress
