"""``dmlkit curvature``."""

from typing import Annotated

import typer

from dmlkit.cli.options import Debug, Plugins, SetDataset, SourcePath, SplitName

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
