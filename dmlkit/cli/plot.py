"""``dmlkit plot``."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from dmlkit.cli.options import Checkpoint, Debug, Plugins, RunDevice, RunSplit, SetDataset
from dmlkit.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from dmlkit.embedding.split import EmbeddedSplit
    from dmlkit.geometry.plot import MapKind

app = typer.Typer()
Kind = Literal["disk", "pca", "tsne", "retrieval", "heatmap", "histogram", "epochs", "results"]
MAPS = ("disk", "pca", "tsne")
OF_IMAGES = (*MAPS, "retrieval", "heatmap", "histogram")
TAKERS = {
    "--split": OF_IMAGES,
    "--checkpoint": OF_IMAGES,
    "--set": OF_IMAGES,
    "--device": OF_IMAGES,
    "--classes": (*MAPS, "heatmap"),
    "--images": MAPS,
    "--queries": ("retrieval",),
    "--neighbors": ("retrieval",),
    "--seed": ("retrieval",),
    "--metric": ("epochs", "results"),
}
"""The kinds that an option is for."""


@app.command(
    epilog="Examples:  dmlkit plot runs/demo --kind tsne --images    dmlkit plot runs/one runs/two -o epochs.pdf"
)
def plot(
    sources: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...|STUDY", help="Folders that train wrote, or study.", show_default=False),
    ],
    kind: Annotated[
        Kind | None,
        typer.Option(
            help="By default the disk for 2-d hyperbolic embeddings, else pca; epochs of several runs, results of a "
            "study. A study has results and epochs.",
            show_default=False,
        ),
    ] = None,
    split: RunSplit = None,
    classes: Annotated[
        int | None, typer.Option(min=1, help="How many to show, evenly spread; 20 by default.", show_default=False)
    ] = None,
    images: Annotated[bool, typer.Option("--images", help="On a map: the images themselves.")] = False,
    queries: Annotated[
        int | None,
        typer.Option(
            min=1, max=50, help="Of retrieval: how many, half of them the worst; 8 by default.", show_default=False
        ),
    ] = None,
    neighbors: Annotated[
        int | None,
        typer.Option("--neighbors", "-k", min=1, max=12, help="Of each query; 6 by default.", show_default=False),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Of the queries drawn at random; 0 by default.", show_default=False)
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            help="Of epochs, by default the one that chose the checkpoint; of results, by default all.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="A .png, .svg or .pdf file; by default in the run or study.")
    ] = None,
    checkpoint: Checkpoint = None,
    overrides: SetDataset = None,
    device: RunDevice = None,
    plugins: Plugins = None,
    debug: Debug = False,
) -> None:
    """Draw runs or a study: maps of embeddings, what is found, similarities, or curves over the epochs."""
    from rich.console import Console

    from dmlkit.cli.progress import bars
    from dmlkit.datasets.files.image import EXTENSIONS
    from dmlkit.embedding.split import embed_split
    from dmlkit.files.outputs import check_outside_data
    from dmlkit.files.pictures import check_picture
    from dmlkit.run_folder.folder import RunFolder

    console = Console()
    of_run = {"--split": split, "--checkpoint": checkpoint, "--set": overrides, "--device": device}
    asked = {
        "--classes": classes,
        "--images": images or None,
        "--queries": queries,
        "--neighbors": neighbors,
        "--seed": seed,
        "--metric": metric,
    }
    is_study = len(sources) == 1 and (sources[0] / "study.json").exists()
    kind = kind or ("results" if is_study else "epochs" if len(sources) > 1 else None)
    check_options(kind, of_run | asked)
    if output is not None:
        check_picture(output)
        if not is_study and output.suffix.lower() in EXTENSIONS:  # a picture among images would be read as one
            check_outside_data(output, [RunFolder(run).recipe().dataset.data_root for run in sources])
    if is_study:
        plot_of_study(sources[0], kind, metric, output, console)
    elif kind == "results":
        raise UserError(f"{sources[0]}: --kind results draws one study, a folder that dmlkit study wrote")
    elif kind == "epochs":
        plot_of_runs(sources, metric, output, console)
    elif len(sources) > 1:
        raise UserError(f"--kind {kind} draws one run, got {len(sources)}; several are drawn by --kind epochs")
    else:
        embedded = embed_split(
            sources[0],
            split or "test",
            checkpoint=checkpoint,
            device=device or "auto",
            overrides=overrides or [],
            bar=bars(console),
        )
        plot_of_images(embedded, kind, asked, output, console)


def check_options(kind: Kind | None, asked: dict[str, Any]) -> None:
    """Refuse options that a kind would ignore.

    Raises:
        UserError: names the option, and the kinds that it is for.
    """
    for option, value in asked.items():
        takers = TAKERS[option]
        if value is not None and (kind or MAPS[0]) not in takers:
            raise UserError(f"{option} is not for --kind {kind or 'disk or pca'}; it is for {', '.join(takers)}")


def plot_of_images(
    embedded: "EmbeddedSplit", kind: Kind | None, asked: dict[str, Any], output: Path | None, out: "Console"
) -> None:
    """A picture of a run's images, with the options of its kind."""
    from dmlkit.cli.console import counted, say
    from dmlkit.cli.progress import bars
    from dmlkit.evaluation.plots.heatmap import plot_heatmap
    from dmlkit.evaluation.plots.histogram import plot_histogram
    from dmlkit.evaluation.plots.retrieval import plot_retrieval
    from dmlkit.geometry.run import plot_map

    bar = bars(out)
    options: dict[str, Any] = {name[2:]: value for name, value in asked.items() if value is not None}
    if kind == "retrieval":
        written, panel = plot_retrieval(embedded, output, bar=bar, **options)
        told = f"{counted(len(panel.queries), 'query', 'queries')}, {panel.worst} of them the worst"
    elif kind == "heatmap":
        written, maps = plot_heatmap(embedded, output, **options)
        told = f"{len(maps.sample_labels)} images of {counted(len(maps.classes), 'class', 'classes')}"
        if maps.proxy_labels is not None:
            told += f" and {counted(len(maps.proxy_labels), 'proxy', 'proxies')}"
        elif embedded.split != "train":
            say(out, "note: proxies are of training classes; --split train shows them, where the loss has some")
    elif kind == "histogram":
        written, _, after = plot_histogram(embedded, output, bar=bar)
        told = f"{int(after.same.sum()):,} pairs of one class and {int(after.different.sum()):,} of two"
    else:
        drawn = plot_map(embedded, output, kind=cast("MapKind | None", kind), bar=bar, **options)
        written = drawn.path
        told = f"{counted(drawn.images, 'image', 'images')} of {counted(drawn.classes, 'class', 'classes')}"
    say(out, f"wrote {written}: {told}")


def plot_of_runs(runs: list[Path], metric: str | None, output: Path | None, out: "Console") -> None:
    """The curves of runs."""
    from dmlkit.cli.console import counted, say
    from dmlkit.run_folder.folder import RunFolder
    from dmlkit.training.epochs import plot_epochs, runs_by_recipe

    if output is None and len(runs) > 1:
        raise UserError(f"--output is needed: the curves of {len(runs)} runs belong to none of them")
    groups = runs_by_recipe(runs)
    output = output or RunFolder(runs[0]).plots / "epochs.png"
    curves = plot_epochs(groups, output, metric=metric)
    say(out, f"wrote {output}: {counted(len(curves), 'curve', 'curves')} of {counted(len(runs), 'run', 'runs')}")


def plot_of_study(folder: Path, kind: Kind | None, metric: str | None, output: Path | None, out: "Console") -> None:
    """What a study found, or the curves of its variants."""
    from dmlkit.cli.console import counted, say
    from dmlkit.files.atomic import atomic_write
    from dmlkit.files.outputs import writing
    from dmlkit.files.pictures import check_picture
    from dmlkit.study.reports.overview import read_results
    from dmlkit.study.reports.plot import epoch_groups, plot_study, requested_metrics
    from dmlkit.training.epochs import plot_epochs

    if kind not in ("results", "epochs"):
        raise UserError(f"--kind {kind} draws a run, and {folder} is a study; it has --kind results and --kind epochs")
    results = read_results(folder)
    output = output or folder / "plots" / f"{kind}.png"
    check_picture(output)
    told = counted(len(results.variants), "variant", "variants")
    if kind == "epochs":
        plot_epochs(epoch_groups(folder, results), output, metric=metric)
    else:
        metrics = requested_metrics(results, metric)
        output.parent.mkdir(parents=True, exist_ok=True)
        with writing(output), atomic_write(output) as partial:
            plot_study(results, partial, output.suffix.lower(), metrics=metrics)
    say(out, f"wrote {output}: {told}, {counted(len(results.seeds), 'seed', 'seeds')}")
