"""``dmlkit data``: look at a dataset before training on it. Heavy imports wait inside the commands."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(name="data", no_args_is_help=True, help="Check a dataset on disk, or make it faster to read.")

Set = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the recipe.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


@app.command(epilog="Examples:  dmlkit data check recipe.yaml    dmlkit data check data/ --dataset cub200")
def check(
    target: Annotated[Path, typer.Argument(metavar="RECIPE|ROOT|TABLE", help="What to check.", show_default=False)],
    dataset: Annotated[
        str | None, typer.Option(help="What the folder ROOT holds; by default it is recognised.", show_default=False)
    ] = None,
    overrides: Set = None,
    debug: Debug = False,  # noqa: ARG001 - main() reads it
) -> None:
    """Decode every image and compare the counts with the published ones; exit code 1 if anything is wrong."""
    from dmlkit.cli.data_commands import check_command

    check_command(target, dataset, overrides or [])


@app.command(epilog="Example:  dmlkit data cache recipe.yaml -o caches/birds")
def cache(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="YAML recipe.", show_default=False)],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write.", show_default=False)],
    overrides: Set = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the cache in the folder.")] = False,
    debug: Debug = False,  # noqa: ARG001 - main() reads it
) -> None:
    """Store all images decoded and resized, for dataset.cache: no decoding while training."""
    from dmlkit.cli.data_commands import cache_command

    cache_command(recipe, output, overrides or [], overwrite)
