"""``dmlkit eval``, ``compare`` and ``protocol``. Heavy imports wait inside the commands."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from dmlkit.errors import UserError

app = typer.Typer()
protocols = typer.Typer(
    name="protocol", no_args_is_help=True, help="Train a recipe several times, and say how sure its figures are."
)
app.add_typer(protocols)

Set = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the recipe.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N or mps.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON alone.")]
Checkpoint = Annotated[
    Literal["best", "last"] | None,
    typer.Option(help="Which weights; by default the best on validation classes, else the last."),
]
RecipeFile = Annotated[Path, typer.Argument(metavar="RECIPE", help="YAML recipe.", show_default=False)]
Output = Annotated[
    Path, typer.Option("--output", "-o", help="Folder of the runs; complete ones are kept.", show_default=False)
]
Repeats = Annotated[int, typer.Option(min=1, help="Trainings with other seeds; rounds of 4 for reality_check.")]


@app.command(
    name="eval",
    epilog="Examples:  dmlkit eval runs/demo --json    dmlkit eval --embeddings x.npy --labels y.npy --metric map@r",
)
def evaluate(
    source: Annotated[
        Path | None,
        typer.Argument(metavar="[RUN|EMBEDDINGS]", help="A folder that train or embed wrote.", show_default=False),
    ] = None,
    embeddings: Annotated[
        Path | None, typer.Option(help="Instead: .npy file of any model's embeddings, one a row.")
    ] = None,
    labels: Annotated[Path | None, typer.Option(help=".npy file of their labels, integers or strings.")] = None,
    gallery: Annotated[Path | None, typer.Option(help=".npy file of other embeddings to search.")] = None,
    gallery_labels: Annotated[Path | None, typer.Option(help=".npy file of their labels.")] = None,
    manifold: Annotated[
        Literal["sphere", "euclidean"], typer.Option(help="How .npy files are compared: by cosine or by distance.")
    ] = "sphere",
    metric: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="e.g. recall@10, map@r, nmi. Repeatable; by default the recipe's."),
    ] = None,
    ties: Annotated[
        Literal["expected", "pessimistic"], typer.Option(help="How items of the same score count.")
    ] = "expected",
    per_class: Annotated[Path | None, typer.Option(help="CSV file to write every class to, worst first.")] = None,
    split: Annotated[
        Literal["train", "validation", "test", "all"] | None,
        typer.Option(help="Of a run's dataset: test by default; all with --dataset-root."),
    ] = None,
    checkpoint: Checkpoint = None,
    dataset_root: Annotated[
        Path | None, typer.Option(help="Evaluate a run on another folder of images, one subfolder a class.")
    ] = None,
    overrides: Set = None,
    json: Json = False,
    device: Device = "auto",
    debug: Debug = False,  # noqa: ARG001 - main() reads it
) -> None:
    """Measure retrieval, with 95 % intervals: of a run on unseen classes, or of any embeddings."""
    arrays = {"--embeddings": embeddings, "--labels": labels, "--gallery": gallery, "--gallery-labels": gallery_labels}
    given = [name for name, path in arrays.items() if path is not None]
    if (source is None) == (not given):
        raise UserError("eval: give a RUN, a folder of EMBEDDINGS, or --embeddings x.npy --labels y.npy")
    if given not in ([], ["--embeddings", "--labels"], list(arrays)):
        raise UserError(
            f"eval: {' '.join(given)}: expected --embeddings and --labels, with both of --gallery or neither"
        )

    from dmlkit.cli import evaluation_commands as commands

    scoring = commands.Scoring(metric or [], ties, per_class, json)
    if embeddings and labels:
        pair = (gallery, gallery_labels) if gallery and gallery_labels else None
        commands.evaluate_arrays_command(embeddings, labels, pair, manifold, scoring)
    elif source and (source / "manifest.json").exists():
        commands.evaluate_folder_command(source, scoring)
    elif source:
        commands.evaluate_run_command(source, split, checkpoint, dataset_root, overrides or [], device, scoring)


@app.command(epilog="Example:  dmlkit compare runs/proxy_anchor runs/triplet --markdown")
def compare(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN RUN...", help="Folders that train wrote.", show_default=False)
    ],
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a Markdown table.")] = False,
    latex: Annotated[bool, typer.Option("--latex", help="Print a LaTeX table (booktabs).")] = False,
    json: Json = False,
    checkpoint: Checkpoint = None,
    device: Device = "auto",
    debug: Debug = False,  # noqa: ARG001 - main() reads it
) -> None:
    """Compare runs on the test classes: intervals, and paired tests against the first run."""
    from dmlkit.cli.evaluation_commands import compare_command

    if markdown + latex + json > 1:
        raise UserError("compare: give one of --markdown, --latex and --json")
    style = "markdown" if markdown else "latex" if latex else "json" if json else "table"
    compare_command(runs, style, checkpoint, device)


@protocols.command(name="official", epilog="Example:  dmlkit protocol official RECIPE -o runs/five --repeats 5")
def official(
    recipe: RecipeFile,
    output: Output,
    repeats: Repeats = 5,
    overrides: Set = None,
    json: Json = False,
    device: Device = "auto",
    debug: Debug = False,  # noqa: ARG001 - main() reads it
) -> None:
    """The recipe as it is with several seeds; the same command continues it after a kill."""
    from dmlkit.cli.evaluation_commands import protocol_command

    protocol_command("official", recipe, output, repeats, overrides or [], device, json)


@protocols.command(
    name="reality_check", epilog="Example:  dmlkit protocol reality_check RECIPE -o runs/check --repeats 10"
)
def reality_check(
    recipe: RecipeFile,
    output: Output,
    repeats: Repeats = 10,
    overrides: Set = None,
    json: Json = False,
    device: Device = "auto",
    debug: Debug = False,  # noqa: ARG001 - main() reads it
) -> None:
    """4 models on class folds, apart and concatenated (Musgrave et al. 2020); the same command continues it."""
    from dmlkit.cli.evaluation_commands import protocol_command

    protocol_command("reality_check", recipe, output, repeats, overrides or [], device, json)
