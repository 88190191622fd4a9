"""``dmlkit export``."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from dmlkit.cli.options import Checkpoint, Debug, Plugins, SetDataset, SourcePath

app = typer.Typer()


@app.command(
    epilog="Examples:  dmlkit export runs/demo --format onnx    dmlkit export embeddings/photos --format faiss"
)
def export(
    source: SourcePath,
    format: Annotated[  # noqa: A002
        Literal["safetensors", "onnx", "torch-export", "faiss", "parquet", "npz", "tensorboard"],
        typer.Option(help="Of a run: the first three. Of embeddings: the others.", show_default=False),
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write; by default in the source.")
    ] = None,
    checkpoint: Checkpoint = None,
    overrides: SetDataset = None,
    plugins: Plugins = None,
    debug: Debug = False,
) -> None:
    """Export a run's model, or embeddings, for other programs."""
    from rich.console import Console

    from dmlkit.cli.console import say
    from dmlkit.export.run import export as export_source

    exported = export_source(source, format, output=output, checkpoint=checkpoint, overrides=overrides or [])
    console = Console()
    if exported.model:
        parity = exported.model.parity
        difference = f"{parity.largest_difference:.0e}"
        kind = exported.model.input.partition(":")[0]
        say(console, f"{exported.files[0]}: agrees with the run on {parity.images} {kind} to {difference}")
        return
    for path in exported.files:
        say(console, f"wrote {path}")
