"""``dmlkit protocol``."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from dmlkit.cli.console import print_table, say, say_json
from dmlkit.cli.options import RESEARCH, Device, Json, RecipePath, Set, Writes, examples, option, with_common_options
from dmlkit.files.atomic import atomic_write
from dmlkit.files.escape import as_markdown
from dmlkit.files.outputs import check_folder

if TYPE_CHECKING:
    from dmlkit.study.record import ProtocolName

app = typer.Typer(
    name="protocol",
    no_args_is_help=True,
    rich_help_panel=RESEARCH,
    help="Train a recipe several times and report means with confidence intervals.",
)


def add_protocol(name: "ProtocolName", repeats: int, folder: str, meaning: str) -> None:
    """Add the command for a protocol; all have the same options."""
    example = f"dmlkit protocol {name} RECIPE -o runs/{folder} --repeats {repeats}"
    help_text = f"{meaning}\n\nIf it is interrupted, the same command resumes."

    @app.command(name, help=help_text, epilog=examples(example))
    @with_common_options
    def _run(
        recipe: RecipePath,
        output: Annotated[
            Path,
            Writes(check_folder, "runs of a protocol", "protocol.json"),
            option("FOLDER", "Folder to write; finished runs in it are kept.", "--output", "-o"),
        ],
        repeats: Annotated[int, option("COUNT", "Number of repeats, each with its own seed.", min=1)] = repeats,
        overrides: Set = None,
        json: Json = False,
        device: Device = "auto",
    ) -> None:

        from dmlkit.recipe.overrides import read_tree

        read_tree(recipe)

        from dmlkit.cli.progress import TrainingProgress, training_progress
        from dmlkit.distributed.launch import start_fabric
        from dmlkit.distributed.stopping import STOPPED, TrainingStoppedError
        from dmlkit.recipe.file import read_recipe
        from dmlkit.recipe.schema import Recipe
        from dmlkit.study.protocol import run_protocol
        from dmlkit.study.reports.tables import protocol_rows

        resolved = read_recipe(recipe, overrides or [])
        fabric = start_fabric(device, resolved.training.precision)
        console = Console(stderr=json, quiet=not fabric.is_global_zero)

        def progress(folder: str, recipe: Recipe) -> TrainingProgress:
            say(console, f"{folder}  seed {recipe.seed}")
            return training_progress(console, recipe, Path(folder))

        try:
            results = run_protocol(name, resolved, output, fabric, repeats=repeats, progress=progress)
        except TrainingStoppedError as stopped:
            say(console, f"{stopped}; rerun the same command to resume")
            raise typer.Exit(STOPPED) from None
        if not fabric.is_global_zero:
            return
        rows = protocol_rows(results)
        with atomic_write(output / "results.md") as partial:
            partial.write_text(as_markdown(rows) + "\n", encoding="utf-8")
        if json:
            say_json(results.plain())
            return
        print_table(rows, console, f"{name}: {recipe.stem}, {repeats} repeats")
        say(console, f"written to {output / 'results.md'} and results.json; the runs are in the same folder")


add_protocol("official", 5, "five", "Train the recipe unchanged with several seeds.")
add_protocol(
    "reality_check",
    10,
    "check",
    "Train 4 models per repeat, one per class fold; evaluate them separately and together (Musgrave et al. 2020).",
)
