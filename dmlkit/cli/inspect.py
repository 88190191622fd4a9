"""``dmlkit inspect``."""

from pathlib import Path
from typing import Annotated

import typer

from dmlkit.cli.options import (
    LOOK,
    ArrayLabels,
    ArrayManifold,
    RunDevice,
    RunSplit,
    SetDataset,
    SourcePath,
    examples,
    with_common_options,
)

app = typer.Typer()


@app.command(rich_help_panel=LOOK, epilog=examples("dmlkit inspect runs/demo -o report.html"))
@with_common_options
def inspect(
    source: SourcePath,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="HTML page to write.", show_default=False)
    ],
    split: RunSplit = None,
    overrides: SetDataset = None,
    device: RunDevice = None,
    labels: ArrayLabels = None,
    manifold: ArrayManifold = None,
) -> None:
    """Write one HTML page of what the model gets wrong: worst queries, confused classes, suspected wrong labels."""
    from rich.console import Console

    from dmlkit.cli.console import counted, say
    from dmlkit.cli.progress import bars
    from dmlkit.embedding.questions.page import check_page
    from dmlkit.training.inspection.findings import inspect as look_at
    from dmlkit.training.inspection.page import write_inspection

    check_page(output, option="--output")
    console = Console()
    bar = bars(console)
    found = look_at(
        source, split=split, overrides=overrides or [], device=device, labels=labels, manifold=manifold, bar=bar
    )
    gone = write_inspection(found, output, f"Inspection of {source}", bar=bar)
    for note in found.notes:
        say(console, f"note: {note}")
    if gone:
        say(console, f"note: {counted(gone, 'picture is', 'pictures are')} missing: image files were moved or deleted")
    say(console, f"wrote {output}, {output.stat().st_size / 1e6:.1f} MB: open it in a browser")
