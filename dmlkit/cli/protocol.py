"""``dmlkit protocol``."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dmlkit.cli.options import Debug, Device, Json, Plugins, RecipePath, Set

if TYPE_CHECKING:
    from dmlkit.study.protocol import ProtocolName

app = typer.Typer(
    name="protocol", no_args_is_help=True, help="Train a recipe several times, and say how sure its figures are."
)
Output = Annotated[
    Path, typer.Option("--output", "-o", help="Folder of the runs; complete ones are kept.", show_default=False)
]
Repeats = Annotated[int, typer.Option(min=1, help="Trainings with other seeds; rounds of 4 for reality_check.")]


@app.command(name="official", epilog="Example:  dmlkit protocol official RECIPE -o runs/five --repeats 5")
def official(
    recipe: RecipePath,
    output: Output,
    repeats: Repeats = 5,
    overrides: Set = None,
    json: Json = False,
    device: Device = "auto",
    plugins: Plugins = None,
    debug: Debug = False,
) -> None:
    """The recipe as it is with several seeds; the same command continues it after a kill."""
    run("official", recipe, output, repeats, overrides or [], device, json)


@app.command(name="reality_check", epilog="Example:  dmlkit protocol reality_check RECIPE -o runs/check --repeats 10")
def reality_check(
    recipe: RecipePath,
    output: Output,
    repeats: Repeats = 10,
    overrides: Set = None,
    json: Json = False,
    device: Device = "auto",
    plugins: Plugins = None,
    debug: Debug = False,
) -> None:
    """4 models on class folds, apart and concatenated (Musgrave et al. 2020); the same command continues it."""
    run("reality_check", recipe, output, repeats, overrides or [], device, json)


def run(
    name: "ProtocolName", path: Path, output: Path, repeats: int, overrides: list[str], device: str, as_json: bool
) -> None:
    """Run a protocol, and print its table."""
    from rich.console import Console

    from dmlkit.cli.console import print_table, say, say_json
    from dmlkit.cli.progress import TrainingProgress
    from dmlkit.distributed.launch import start_fabric
    from dmlkit.distributed.stopping import STOPPED, TrainingStoppedError
    from dmlkit.evaluation.tables import as_markdown
    from dmlkit.files.atomic import atomic_write
    from dmlkit.recipe.file import read_recipe
    from dmlkit.recipe.schema import Recipe
    from dmlkit.study.protocol import run_protocol
    from dmlkit.study.reports.tables import protocol_rows

    recipe = read_recipe(path, overrides)
    fabric = start_fabric(device, recipe.training.precision)
    console = Console(stderr=as_json)
    console.quiet = not fabric.is_global_zero

    def progress(folder: str, recipe: Recipe) -> TrainingProgress:
        say(console, f"{folder}  seed {recipe.seed}")
        return TrainingProgress(console, recipe.training.epochs)

    try:
        results = run_protocol(name, recipe, output, fabric, repeats=repeats, progress=progress)
    except TrainingStoppedError as stopped:
        say(console, f"{stopped}; continue with the same command")
        raise typer.Exit(STOPPED) from None
    if not fabric.is_global_zero:
        return
    rows = protocol_rows(results)
    with atomic_write(output / "results.md") as partial:
        partial.write_text(as_markdown(rows) + "\n", encoding="utf-8")
    if as_json:
        say_json(results.plain())
        return
    print_table(rows, console, f"{name}: {path.stem}, {repeats} repeats")
    say(console, f"written to {output / 'results.md'} and results.json; the runs are beside them")
