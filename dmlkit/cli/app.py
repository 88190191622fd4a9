"""The command line. Heavy imports wait inside the commands, so that --help answers at once."""

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from dmlkit import __version__
from dmlkit.cli import data, evaluation, study
from dmlkit.errors import UserError

app = typer.Typer(
    name="dmlkit",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Deep metric learning from labelled images to searchable embeddings: "
    "[bold]train[/] a recipe, [bold]eval[/] it on unseen classes, [bold]embed[/] images, [bold]export[/] the result.",
    epilog="Start with:  dmlkit train recipes/glyphs/proxy_anchor.yaml --output runs/demo",
)

app.add_typer(evaluation.app)
app.add_typer(data.app)
app.add_typer(study.app)

Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the recipe, e.g. loss.margin=0.2. Repeatable."),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N or mps.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="Folder that train wrote.", show_default=False)]
RecipeFile = Annotated[Path, typer.Argument(metavar="RECIPE", help="YAML recipe.", show_default=False)]
Checkpoint = Annotated[
    Literal["best", "last"] | None,
    typer.Option(help="Which weights; by default the best on validation classes, else the last."),
]
SplitName = Literal["train", "validation", "test", "all"]


def main() -> None:
    """Run the command line; a user's mistake ends as one line and exit code 2."""
    try:
        app()
    except UserError as error:
        if "--debug" in sys.argv:
            raise
        for line in str(error).splitlines():
            typer.secho(f"error: {line}", fg="red", err=True)
        raise SystemExit(2) from None


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"dmlkit {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None: ...


@app.command(epilog="Example:  dmlkit train recipes/glyphs/proxy_anchor.yaml --set training.epochs=3 -o runs/short")
def train(
    recipe: RecipeFile,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Run folder; by default runs/ and the recipe's name.")
    ] = None,
    overrides: Set = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in the folder.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run in the folder.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Build everything, say what would run, write nothing.")
    ] = False,
    device: Device = "auto",
    debug: Debug = False,
) -> None:
    """Train a recipe into a run folder."""
    from dmlkit.cli.commands import train_command

    train_command(recipe, output or Path("runs") / recipe.stem, overrides or [], device, resume, overwrite, dry_run)


@app.command(epilog="Example:  dmlkit embed runs/demo photos/ -o embeddings/photos")
def embed(
    run: Run,
    images: Annotated[Path | None, typer.Argument(metavar="[IMAGES]", help="Folder of images.")] = None,
    split: Annotated[SplitName | None, typer.Option(help="Embed a split of the run's own dataset instead.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Folder to write.", show_default=False)] = None,
    checkpoint: Checkpoint = None,
    skip_bad_images: Annotated[
        bool, typer.Option("--skip-bad-images", help="Leave out images that cannot be read, and list them.")
    ] = False,
    engine: Annotated[
        Literal["local", "torchrun", "ray"] | None,
        typer.Option(
            help="Who computes: this process, torchrun's ranks, or workers of a Ray cluster, which all reach RUN, the "
            "images and the output. By default torchrun's ranks where there are several, else this process.",
            show_default=False,
        ),
    ] = None,
    device: Device = "auto",
    debug: Debug = False,
) -> None:
    """Embed images into embeddings.npy, items.parquet and manifest.json.

    Stopped or killed, the same command goes on where it was, also with another engine.
    """
    from dmlkit.cli.commands import embed_command

    embed_command(run, images, split, output, checkpoint, skip_bad_images, device, engine)


@app.command(
    epilog="Examples:  dmlkit export runs/demo --format onnx    dmlkit export embeddings/photos --format faiss"
)
def export(
    source: Annotated[Path, typer.Argument(metavar="RUN|EMBEDDINGS", help="What to export.", show_default=False)],
    format: Annotated[  # noqa: A002
        Literal["safetensors", "onnx", "torch-export", "faiss", "parquet", "npz", "tensorboard"],
        typer.Option(help="Of a run: the first three. Of embeddings: the others.", show_default=False),
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write; by default in the source.")
    ] = None,
    checkpoint: Checkpoint = None,
    debug: Debug = False,
) -> None:
    """Export a run's model, or embeddings, for other programs."""
    from dmlkit.cli.commands import export_command

    export_command(source, format, output, checkpoint)


@app.command(epilog="Examples:  dmlkit curvature runs/demo    dmlkit curvature embeddings/photos")
def curvature(
    source: Annotated[Path, typer.Argument(metavar="RUN|EMBEDDINGS", help="What to look at.", show_default=False)],
    split: Annotated[SplitName, typer.Option(help="Of a run: whose images.")] = "train",
    sample: Annotated[int, typer.Option(min=4, help="Images a draw; the time grows with its cube.")] = 500,
    draws: Annotated[int, typer.Option(min=1, help="How often to draw.")] = 10,
    seed: Annotated[int, typer.Option(help="Decides the draws.")] = 0,
    device: Device = "auto",
    debug: Debug = False,
) -> None:
    """Measure how tree-like features are, and suggest the curvature of a hyperbolic space for them."""
    from dmlkit.cli.geometry_commands import curvature_command

    curvature_command(source, split, sample, draws, seed, device)


@app.command(epilog="Examples:  dmlkit plot runs/demo --kind tsne    dmlkit plot runs/disk -o disk.svg")
def plot(
    run: Run,
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
    device: Device = "auto",
    debug: Debug = False,
) -> None:
    """Draw a run's embeddings, coloured by class."""
    from dmlkit.cli.geometry_commands import plot_command

    plot_command(run, kind, split, classes, output, checkpoint, device)


@app.command(name="list", epilog="Examples:  dmlkit list losses    dmlkit list recipes")
def list_parts(
    family: Annotated[str | None, typer.Argument(help="One family, or recipes.", show_default=False)] = None,
    root: Annotated[Path | None, typer.Option(help="Folder of recipes, by default recipes/.")] = None,
    debug: Debug = False,
) -> None:
    """List the parts that recipes put together, or the recipes."""
    from dmlkit.cli.commands import list_command

    list_command(family, root)


@app.command(epilog="Example:  dmlkit check recipes/glyphs/proxy_anchor.yaml")
def check(recipe: RecipeFile, overrides: Set = None, debug: Debug = False) -> None:
    """Check a recipe and print it with every default spelled out."""
    from dmlkit.recipe.file import dump_recipe, read_recipe

    typer.echo(dump_recipe(read_recipe(recipe, overrides or [])), nl=False)


@app.command(epilog="Example:  dmlkit schema > recipe.schema.json")
def schema(debug: Debug = False) -> None:
    """Print the JSON schema of recipes, for editors."""
    import json

    from dmlkit.recipe.file import schema as recipe_schema

    result: dict[str, Any] = recipe_schema()
    typer.echo(json.dumps(result, indent=2))
