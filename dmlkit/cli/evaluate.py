"""``dmlkit eval``: of a run, of a folder of embeddings, or of bare arrays."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict

import typer

from dmlkit.cli.evaluation_report import Shown
from dmlkit.cli.options import Checkpoint, Debug, Json, Plugins, Set, SplitName
from dmlkit.errors import UserError

if TYPE_CHECKING:
    from lightning_fabric import Fabric

    from dmlkit.embedding.in_memory import Bar
    from dmlkit.run_folder.folder import CheckpointName

app = typer.Typer()


@app.command(
    name="eval",
    epilog="Examples:  dmlkit eval runs/demo --json    dmlkit eval --embeddings x.npy --labels y.npy --metric map@r    "
    "dmlkit eval recipe.yaml --untrained --set backbone.weights=resnet18.pth",
)
def evaluate(
    source: Annotated[
        Path | None,
        typer.Argument(
            metavar="[RUN|EMBEDDINGS|RECIPE]",
            help="A folder that train or embed wrote; with --untrained a recipe or a run.",
            show_default=False,
        ),
    ] = None,
    untrained: Annotated[
        bool,
        typer.Option("--untrained", help="Score the backbone of a recipe as it is before training, without its head."),
    ] = False,
    embeddings: Annotated[
        Path | None, typer.Option(help="Instead: .npy file of any model's embeddings, one a row.")
    ] = None,
    labels: Annotated[Path | None, typer.Option(help=".npy file of their labels, integers or strings.")] = None,
    gallery: Annotated[Path | None, typer.Option(help=".npy file of other embeddings to search.")] = None,
    gallery_labels: Annotated[Path | None, typer.Option(help=".npy file of their labels.")] = None,
    manifold: Annotated[
        Literal["sphere", "euclidean"] | None,
        typer.Option(help="How .npy files are compared: by cosine (the default) or by distance.", show_default=False),
    ] = None,
    metric: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="e.g. recall@10, map@r, nmi. Repeatable; by default the recipe's."),
    ] = None,
    ties: Annotated[
        Literal["expected", "pessimistic"], typer.Option(help="How items of the same score count.")
    ] = "expected",
    per_class: Annotated[Path | None, typer.Option(help="CSV file to write every class to, worst first.")] = None,
    split: Annotated[
        SplitName | None, typer.Option(help="Of a run's dataset: test by default; all with --dataset-root.")
    ] = None,
    checkpoint: Checkpoint = None,
    dataset_root: Annotated[
        Path | None, typer.Option(help="Evaluate a run on another folder of images, one subfolder a class.")
    ] = None,
    overrides: Set = None,
    json: Json = False,
    device: Annotated[
        str | None, typer.Option(help="Of a run: auto (the default), cpu, cuda, cuda:N or mps.", show_default=False)
    ] = None,
    plugins: Plugins = None,
    debug: Debug = False,
) -> None:
    """Measure retrieval, with 95 % intervals: of a run on unseen classes, or of any embeddings."""
    arrays = {"--embeddings": embeddings, "--labels": labels, "--gallery": gallery, "--gallery-labels": gallery_labels}
    of_runs = {"--split": split, "--checkpoint": checkpoint, "--dataset-root": dataset_root, "--set": overrides}
    of_runs["--device"] = device
    kind = kind_of(source, arrays, of_runs, untrained=untrained, manifold=manifold)

    from dmlkit.cli.progress import bars
    from dmlkit.evaluation.arrays import evaluate_arrays, evaluate_folder
    from dmlkit.evaluation.result import is_class_table
    from dmlkit.files.outputs import check_output

    if per_class is not None:
        read = [path for path in arrays.values() if path]
        check_output(per_class, is_class_table, sources=read, option="--per-class")
    shown = Shown(json, per_class)
    wanted: Wanted = {"metrics": metric or [], "ties": ties, "bar": bars(shown.console)}
    if embeddings and labels:
        pair = (gallery, gallery_labels) if gallery and gallery_labels else None
        found = evaluate_arrays(embeddings, labels, gallery=pair, manifold=manifold or "sphere", **wanted)
        shown.tell(*found, title=str(embeddings))
    elif source and kind == "folder":
        shown.tell(*evaluate_folder(source, **wanted), title=str(source))
    elif source:
        from dmlkit.distributed.launch import start_fabric

        fabric = start_fabric(device or "auto")
        shown.console.quiet = not fabric.is_global_zero
        images: Evaluated = {"split": split, "dataset_root": dataset_root, "overrides": overrides or []}
        if kind == "untrained":
            tell_untrained(source, fabric, shown, images, wanted)
        else:
            tell_run(source, fabric, shown, images, wanted, checkpoint)


class Evaluated(TypedDict):
    """Which images are evaluated."""

    split: SplitName | None
    dataset_root: Path | None
    overrides: list[str]


class Wanted(TypedDict):
    """Which figures are told of them, and how they are made."""

    metrics: list[str]
    ties: Literal["expected", "pessimistic"]
    bar: "Bar"


def tell_untrained(source: Path, fabric: "Fabric", shown: Shown, images: Evaluated, wanted: Wanted) -> None:
    """Evaluate the backbone of a recipe, or of a run, as it is before training."""
    from dmlkit.training.untrained_baseline import describe_backbone, evaluate_untrained

    report, evaluation, recipe = evaluate_untrained(source, fabric, **images, **wanted)
    if fabric.is_global_zero:
        title = f"{report.split} split of {recipe.dataset.name}, {describe_backbone(recipe)}"
        shown.tell(report, evaluation, title=title)


def tell_run(
    source: Path,
    fabric: "Fabric",
    shown: Shown,
    images: Evaluated,
    wanted: Wanted,
    checkpoint: "CheckpointName | None",
) -> None:
    """Evaluate a run, and say where its report is."""
    from dmlkit.cli.console import say
    from dmlkit.evaluation.run import evaluate_run

    run = evaluate_run(source, checkpoint=checkpoint, fabric=fabric, **images, **wanted)
    if not fabric.is_global_zero:
        return
    title = f"{run.report.split} split of {run.dataset}, {run.checkpoint} checkpoint, epoch {run.report.epoch}"
    shown.tell(run.report, run.evaluation, title=title)
    if not shown.as_json:
        say(shown.console, f"written to {run.path}")


def kind_of(
    source: Path | None,
    arrays: dict[str, Path | None],
    of_runs: dict[str, Any],
    *,
    untrained: bool,
    manifold: str | None,
) -> Literal["arrays", "folder", "untrained", "run"]:
    """What is evaluated.

    Args:
        source: a run, a folder of embeddings, or a recipe.
        arrays: files, by option.
        of_runs: values of options that apply to runs alone.
        untrained: whether the option is given.
        manifold: how arrays are compared.

    Raises:
        UserError: it is nothing, or two things at once, or an option does not apply to it.
    """
    given = [name for name, path in arrays.items() if path is not None]
    if untrained:
        options = {"--checkpoint": of_runs["--checkpoint"], "--manifold": manifold}
        refuse("--untrained, which has no head and no checkpoint", options)
        refuse("--untrained, which takes a recipe or a run", dict.fromkeys(given, True))
        if source is None:
            raise UserError("eval: --untrained needs a RECIPE or a RUN, e.g. dmlkit eval recipe.yaml --untrained")
    if (source is None) == (not given):
        raise UserError("eval: give a RUN, a folder of EMBEDDINGS, or --embeddings x.npy --labels y.npy")
    if given not in ([], ["--embeddings", "--labels"], list(arrays)):
        raise UserError(
            f"eval: {' '.join(given)}: expected --embeddings and --labels, with both of --gallery or neither"
        )
    if source is None:
        refuse("arrays", of_runs)
        return "arrays"
    is_folder = (source / "manifest.json").exists()
    if is_folder and untrained:
        raise UserError(f"eval: {source}: embeddings are of a model already; --untrained takes a recipe or a run")
    if source.is_file() and not untrained:
        raise UserError(
            f"eval: {source}: got a file, expected a folder that train or embed wrote; a recipe is scored by "
            "--untrained, or once it is trained"
        )
    if is_folder:
        refuse("a folder of embeddings", of_runs)
    refuse("a folder of embeddings, which knows its own" if is_folder else "a run", {"--manifold": manifold})
    return "untrained" if untrained else "folder" if is_folder else "run"


def refuse(what: str, options: dict[str, Any]) -> None:
    """Stop at options that do not apply to what is evaluated.

    Raises:
        UserError: names the first of them.
    """
    for name, value in options.items():
        if value:
            raise UserError(f"eval: {name} does not apply to {what}; leave it out")
