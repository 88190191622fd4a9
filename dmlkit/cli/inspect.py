"""``dmlkit inspect``."""

from pathlib import Path
from typing import Annotated

import typer

from dmlkit.cli.options import Debug, Plugins, RunDevice, RunSplit, SetDataset, SourcePath

app = typer.Typer()


@app.command(epilog="Example:  dmlkit inspect runs/demo -o report.html")
def inspect(
    source: SourcePath,
    output: Annotated[Path, typer.Option("--output", "-o", help="HTML file to write.", show_default=False)],
    split: RunSplit = None,
    overrides: SetDataset = None,
    device: RunDevice = None,
    plugins: Plugins = None,
    debug: Debug = False,
) -> None:
    """Show what a model gets right and wrong, and doubtful labels, in one page that opens anywhere."""
    from rich.console import Console

    from dmlkit.cli.console import counted, say
    from dmlkit.cli.progress import bars
    from dmlkit.embedding.questions.page import check_page
    from dmlkit.training.inspection.findings import inspect as look_at
    from dmlkit.training.inspection.page import write_inspection

    check_page(output, option="--output")
    console = Console()
    bar = bars(console)
    found = look_at(source, split=split, overrides=overrides or [], device=device, bar=bar)
    gone = write_inspection(found, output, f"Inspection of {source}", bar=bar)
    for note in found.notes:
        say(console, f"note: {note}")
    if gone:
        say(console, f"note: {counted(gone, 'picture is', 'pictures are')} missing: no image is where it was")
    say(console, f"wrote {output}, {output.stat().st_size / 1e6:.1f} MB: open it in a browser")
