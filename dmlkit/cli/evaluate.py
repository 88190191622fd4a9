"""``dmlkit eval``: of a run, of a folder of embeddings, or of bare arrays."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dmlkit.cli.options import Checkpoint, Debug, Json, Plugins, Set, SplitName
from dmlkit.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from dmlkit.evaluation.report import Report

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
    given = [name for name, path in arrays.items() if path is not None]
    if untrained:
        refuse("--untrained, which has no head and no checkpoint", {"--checkpoint": checkpoint, "--manifold": manifold})
        refuse("--untrained, which takes a recipe or a run", dict.fromkeys(given, True))
        if source is None:
            raise UserError("eval: --untrained needs a RECIPE or a RUN, e.g. dmlkit eval recipe.yaml --untrained")
    if (source is None) == (not given):
        raise UserError("eval: give a RUN, a folder of EMBEDDINGS, or --embeddings x.npy --labels y.npy")
    if given not in ([], ["--embeddings", "--labels"], list(arrays)):
        raise UserError(
            f"eval: {' '.join(given)}: expected --embeddings and --labels, with both of --gallery or neither"
        )
    of_runs = {"--split": split, "--checkpoint": checkpoint, "--dataset-root": dataset_root, "--set": overrides}
    of_runs["--device"] = device
    is_folder = source is not None and (source / "manifest.json").exists()
    if is_folder and untrained:
        raise UserError(f"eval: {source}: embeddings are of a model already; --untrained takes a recipe or a run")
    if source is not None and source.is_file() and not untrained:
        raise UserError(
            f"eval: {source}: got a file, expected a folder that train or embed wrote; a recipe is scored by "
            "--untrained, or once it is trained"
        )
    if given or is_folder:
        refuse("arrays" if given else "a folder of embeddings", of_runs)
    if not given:
        refuse("a folder of embeddings, which knows its own" if is_folder else "a run", {"--manifold": manifold})

    from dmlkit.cli.progress import bars
    from dmlkit.evaluation.arrays import evaluate_arrays, evaluate_folder
    from dmlkit.evaluation.result import is_class_table
    from dmlkit.evaluation.run import evaluate_run
    from dmlkit.files.outputs import check_output

    if per_class is not None:
        read = [path for path in arrays.values() if path]
        check_output(per_class, is_class_table, sources=read, option="--per-class")

    shown = Shown(json, per_class)
    if embeddings and labels:
        pair = (gallery, gallery_labels) if gallery and gallery_labels else None
        found = evaluate_arrays(
            embeddings,
            labels,
            gallery=pair,
            manifold=manifold or "sphere",
            metrics=metric or [],
            ties=ties,
            bar=bars(shown.console),
        )
        shown.tell(*found, title=str(embeddings))
    elif source and is_folder:
        found = evaluate_folder(source, metrics=metric or [], ties=ties, bar=bars(shown.console))
        shown.tell(*found, title=str(source))
    elif source and untrained:
        from dmlkit.distributed.launch import start_fabric
        from dmlkit.training.untouched import evaluate_untrained, phrase_of

        fabric = start_fabric(device or "auto")
        shown.console.quiet = not fabric.is_global_zero
        report, evaluation, recipe = evaluate_untrained(
            source,
            fabric,
            split=split,
            dataset_root=dataset_root,
            overrides=overrides or [],
            metrics=metric or [],
            ties=ties,
            bar=bars(shown.console),
        )
        if fabric.is_global_zero:
            shown.tell(report, evaluation, title=f"{report.split} split of {recipe.dataset.name}, {phrase_of(recipe)}")
    elif source:
        from dmlkit.cli.console import say
        from dmlkit.distributed.launch import start_fabric

        fabric = start_fabric(device or "auto")
        shown.console.quiet = not fabric.is_global_zero
        run = evaluate_run(
            source,
            split=split,
            checkpoint=checkpoint,
            dataset_root=dataset_root,
            overrides=overrides or [],
            metrics=metric or [],
            ties=ties,
            fabric=fabric,
            bar=bars(shown.console),
        )
        if not fabric.is_global_zero:
            return
        title = f"{run.report.split} split of {run.dataset}, {run.checkpoint} checkpoint, epoch {run.report.epoch}"
        shown.tell(run.report, run.evaluation, title=title)
        if not json:
            say(shown.console, f"written to {run.path}")


def refuse(what: str, options: dict[str, Any]) -> None:
    """Stop at options that do not apply to what is evaluated.

    Raises:
        UserError: names the first of them.
    """
    for name, value in options.items():
        if value:
            raise UserError(f"eval: {name} does not apply to {what}; leave it out")


@dataclass(frozen=True)
class Shown:
    """How an evaluation is told."""

    as_json: bool
    per_class: Path | None

    @property
    def console(self) -> "Console":
        """Where people read; JSON alone goes to the standard output."""
        from rich.console import Console

        return Console(stderr=self.as_json)

    def tell(self, report: "Report", evaluation: Any, *, title: str) -> None:
        """Print a report, and write the table of classes where one is asked for."""
        from dmlkit.cli.console import print_table, say, say_json
        from dmlkit.evaluation.tables import metric_rows

        if self.per_class is not None:
            evaluation.save_classes(self.per_class)
        if self.as_json:
            say_json(report.stamped())
            return
        console = self.console
        title = f"{title}: {report.queries} queries, {report.classes} classes"
        print_table(metric_rows(report, evaluation.scores.definitions), console, title)
        for score in report.worst_classes[:3]:
            name, figure = list(score.metrics.items())[-1]
            say(console, f"worst: {score.name}, {name} {figure:.4f} over {score.queries} queries")
        for pair in report.confusions[:3]:
            times = f"{pair.queries} queries, {pair.share:.0%} of its own"
            say(console, f"confused: {pair.name} taken for {pair.taken_for} by {times}")
        for note in report.notes:
            say(console, f"note: {note}")
        if report.skipped:
            say(console, f"{len(report.skipped)} images could not be read and were left out")
