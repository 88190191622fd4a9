"""``dmlkit curvature`` and ``dmlkit plot``."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from dmlkit.cli.options import Checkpoint, Debug, Device, Plugins, RunPath, SetDataset, SourcePath, SplitName

app = typer.Typer()


@app.command(epilog="Examples:  dmlkit curvature runs/demo    dmlkit curvature embeddings/photos")
def curvature(
    source: SourcePath,
    split: Annotated[
        SplitName | None, typer.Option(help="Of a run: whose images; train by default.", show_default=False)
    ] = None,
    overrides: SetDataset = None,
    sample: Annotated[int, typer.Option(min=4, help="Images a draw; the time grows with its cube.")] = 500,
    draws: Annotated[int, typer.Option(min=1, help="How often to draw.")] = 10,
    seed: Annotated[int, typer.Option(help="Decides the draws.")] = 0,
    device: Annotated[
        str | None, typer.Option(help="Of a run: auto (the default), cpu, cuda, cuda:N or mps.", show_default=False)
    ] = None,
    plugins: Plugins = None,
    debug: Debug = False,
) -> None:
    """Measure how tree-like features are, and suggest the curvature of a hyperbolic space for them."""
    from rich.console import Console

    from dmlkit.cli.console import say
    from dmlkit.geometry.run import measure_curvature

    measured = measure_curvature(
        source, split=split, sample=sample, draws=draws, seed=seed, device=device, overrides=overrides or []
    )
    console, found = Console(), measured.hyperbolicity
    say(console, f"{measured.points} {measured.what}")
    spread = f"{found.mean:.3f} ± {found.deviation:.3f} ({draws} draws of {min(sample, measured.points)}; 0 is a tree)"
    say(console, f"relative delta-hyperbolicity {spread}")
    low_and_high = found.curvatures_within_deviation()
    within = f" ({low_and_high[0]:.3f} to {low_and_high[1]:.3f} within a deviation of delta)" if low_and_high else ""
    say(console, f"suggested curvature: {found.curvature:.3f}{within}")
    say(console, f'try: --set "manifold={{name: poincare, curvature: {found.curvature:.3f}}}"')


@app.command(epilog="Examples:  dmlkit plot runs/demo --kind tsne    dmlkit plot runs/disk -o disk.svg")
def plot(
    run: RunPath,
    kind: Annotated[
        Literal["disk", "pca", "tsne"] | None,
        typer.Option(help="By default the disk for 2-d hyperbolic embeddings, else pca."),
    ] = None,
    split: Annotated[SplitName, typer.Option(help="Whose images.")] = "test",
    classes: Annotated[int, typer.Option(min=1, help="How many classes to show, evenly spread.")] = 20,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="A .png or .svg file; by default in the run.")
    ] = None,
    checkpoint: Checkpoint = None,
    overrides: SetDataset = None,
    device: Device = "auto",
    plugins: Plugins = None,
    debug: Debug = False,
) -> None:
    """Draw a run's embeddings, coloured by class."""
    from rich.console import Console

    from dmlkit.cli.console import counted, say
    from dmlkit.cli.progress import bars
    from dmlkit.geometry.run import plot_run

    drawn = plot_run(
        run,
        kind=kind,
        split=split,
        classes=classes,
        output=output,
        checkpoint=checkpoint,
        device=device,
        overrides=overrides or [],
        bar=bars(Console()),
    )
    images, classes_drawn = counted(drawn.images, "image", "images"), counted(drawn.classes, "class", "classes")
    say(Console(), f"wrote {drawn.path}: {images} of {classes_drawn}")
