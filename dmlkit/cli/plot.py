"""``dmlkit plot``: one command for each kind of picture."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dmlkit.cli.console import bars, counted, say
from dmlkit.cli.options import APPS, Checkpoint, Device, SetDataset, SplitName, Writes, command, each, examples
from dmlkit.errors import UserError
from dmlkit.files.outputs import check_file, check_place
from dmlkit.files.pictures import PICTURES
from dmlkit.files.regular import EXTENSIONS
from dmlkit.files.source import is_study, require_run, require_study

if TYPE_CHECKING:
    from dmlkit.plots.geometry import MapKind
    from dmlkit.plots.split import EmbeddedSplit


APPS[__name__] = typer.Typer(
    name="plot",
    no_args_is_help=True,
    help="Draw a run, several runs or a study as a PNG, SVG or PDF picture.",
    epilog=examples("dmlkit plot tsne runs/demo --thumbnails", "dmlkit plot epochs runs/one runs/two -o epochs.pdf"),
)


def require_plotted_run(path: Path) -> None:
    """Check that a folder is a run, and not the study of runs that other kinds of pictures draw."""
    if is_study(path):
        raise UserError(f"{path}: expected a run folder, got a study; use dmlkit plot results or dmlkit plot epochs")
    require_run(path)


def require_runs_or_study(paths: list[Path]) -> None:
    """Check that paths are runs, or a single study."""
    if not (len(paths) == 1 and is_study(paths[0])):
        each(require_run)(paths)


PlottedRun = Annotated[Path, "RUN", "Run folder, written by train.", require_plotted_run]
RunsOrStudy = Annotated[list[Path], "RUN|STUDY", "One or more run folders, or one study folder.", require_runs_or_study]
Split = Annotated[SplitName, "SPLIT", "Split to draw: train, validation, test or all."]
Classes = Annotated[int, "COUNT", "Number of classes to show, at equal steps in the list of classes.", {"min": 1}]
Metric = Annotated[str | None, "NAME", "Metric to draw. Default: the one that chose the checkpoint."]
Output = Annotated[
    Path | None,
    "FILE",
    "Picture to write: .png, .svg or .pdf. Default: a .png file in plots/ of the run or study.",
    Writes(check_file, PICTURES),
]


@dataclass(frozen=True)
class PictureOptions:
    """Options of a picture of an embedded split."""

    output: Output = None
    checkpoint: Checkpoint = None
    overrides: SetDataset = None
    device: Device = "auto"

    def embed(
        self, run: Path, split: SplitName, kind: str, *, with_gallery: bool = False
    ) -> "tuple[EmbeddedSplit, Path]":
        """Embed a split of a run with a progress bar, see `embed_split`; return it with the checked output."""
        from dmlkit.plots.split import embed_split

        check_target(self.output, [run])
        of_run: Any = {"checkpoint": self.checkpoint, "device": self.device, "overrides": self.overrides or []}
        embedded = embed_split(run, split, **of_run, with_gallery=with_gallery, bar=bars())
        return embedded, self.output or embedded.run.picture_of(split, embedded.trained.checkpoint, kind)


def add_map(kind: "MapKind", help_text: str) -> None:
    """Add the command for a kind of map; the kinds have the same options."""

    @command(f"dmlkit plot {kind} runs/demo --thumbnails", name=kind, help=help_text)
    def _draw(
        run: PlottedRun,
        /,
        split: Split = "test",
        number: Classes = 20,
        thumbnails: Annotated[bool, "Draw small pictures instead of dots."] = False,
        *,
        options: PictureOptions,
    ) -> None:
        from dmlkit.plots.geometry import check_map, plot_map

        check_map(run, kind)
        embedded, output = options.embed(run, split, kind)
        shown = plot_map(embedded, output, kind=kind, classes=number, images=thumbnails, bar=bars())
        classes = counted(len(shown.labels.unique()), "class", "classes")
        say(f"wrote {output}: {counted(len(shown.labels), 'image')} of {classes}")


add_map("disk", "Draw 2-d hyperbolic embeddings in the Poincaré disk, colored by class.")
add_map("pca", "Draw the embeddings along their two main directions (PCA), colored by class.")
add_map("tsne", "Draw a t-SNE map of the embeddings, colored by class.")


@command("dmlkit plot retrieval runs/demo -n 4 -k 5")
def retrieval(
    run: PlottedRun,
    /,
    split: Split = "test",
    number: Annotated[
        int, "COUNT", "Number of queries; half are the worst-scoring, half are random.", {"min": 1, "max": 50}
    ] = 8,
    k: Annotated[int, "COUNT", "Number of neighbors per query.", {"min": 1, "max": 12}] = 6,
    *,
    options: PictureOptions,
) -> None:
    """Draw queries and their nearest neighbors, marked as right or wrong."""
    from dmlkit.plots.retrieval import plot_retrieval

    embedded, output = options.embed(run, split, "retrieval", with_gallery=True)
    panel = plot_retrieval(embedded, output, queries=number, neighbors=k, bar=bars())
    say(f"wrote {output}: {counted(len(panel.queries), 'query', 'queries')}, including the {panel.worst} worst")


@command("dmlkit plot heatmap runs/demo --split train")
def heatmap(run: PlottedRun, /, split: Split = "test", number: Classes = 20, *, options: PictureOptions) -> None:
    """Draw the similarities between images and proxies, and between classes."""
    from dmlkit.plots.similarities import plot_heatmap

    embedded, output = options.embed(run, split, "heatmap")
    maps = plot_heatmap(embedded, output, classes=number)
    shown = f"{len(maps.sample_labels)} images of {counted(len(maps.classes), 'class', 'classes')}"
    if maps.proxy_labels is not None:
        shown += f" and {counted(len(maps.proxy_labels), 'proxy', 'proxies')}"
    elif embedded.split != "train":
        say("note: only training classes have proxies; use --split train to show those of the loss, if any")
    say(f"wrote {output}: {shown}")


@command("dmlkit plot histogram runs/demo")
def histogram(run: PlottedRun, /, split: Split = "test", *, options: PictureOptions) -> None:
    """Draw the similarities of same-class and different-class pairs, before and after training."""
    from dmlkit.plots.similarities import plot_histogram

    embedded, output = options.embed(run, split, "histogram")
    _, after = plot_histogram(embedded, output, bar=bars())
    same, different = int(after.same.sum()), int(after.different.sum())
    say(f"wrote {output}: {same:,} same-class pairs and {different:,} different-class pairs")


@command("dmlkit plot epochs runs/demo", "dmlkit plot epochs runs/one runs/two --metric map@r -o epochs.pdf")
def epochs(sources: RunsOrStudy, /, metric: Metric = None, output: Output = None) -> None:
    """Draw the loss and a validation metric over the epochs of runs, or of the variants of a study."""
    from dmlkit.run_folder.folder import RunFolder
    from dmlkit.training.epochs import plot_epochs, runs_by_recipe

    if len(sources) == 1 and is_study(sources[0]):
        from dmlkit.study.report import epoch_groups, read_results

        results, place = read_results(sources[0]), sources[0] / "plots"
        groups = epoch_groups(sources[0], results)
        shown = f"{counted(len(results.variants), 'variant')}, {counted(len(results.seeds), 'seed')}"
    else:
        if output is None and len(sources) > 1:
            raise UserError(f"plot epochs: the curves of {len(sources)} runs need --output FILE, e.g. -o epochs.png")
        check_target(output, sources)
        groups, place = runs_by_recipe(sources), RunFolder(sources[0]).plots
        shown = f"{counted(len(groups), 'curve')} of {counted(len(sources), 'run')}"
    output = output or place / "epochs.png"
    plot_epochs(groups, output, metric=metric)
    say(f"wrote {output}: {shown}")


@command("dmlkit plot results runs/study/mpa --metric map@r -o mpa.pdf")
def results(
    study: Annotated[Path, "STUDY", "Study folder, written by study.", require_study],
    /,
    metric: Annotated[str | None, "NAME", "Metric to draw. Default: all."] = None,
    output: Output = None,
) -> None:
    """Draw the metrics of a study: one value per variant, or a curve if it varies a number."""
    from dmlkit.study.report import plot_study, read_results

    output, figures = output or study / "plots" / "results.png", read_results(study)
    plot_study(figures, output, metric=metric)
    say(f"wrote {output}: {counted(len(figures.variants), 'variant')}, {counted(len(figures.seeds), 'seed')}")


def check_target(output: Path | None, runs: Sequence[Path]) -> None:
    """Check an output before anything is computed."""
    from dmlkit.run_folder.folder import RunFolder

    if output is not None and output.suffix.lower() in EXTENSIONS:
        check_place(output, [RunFolder(run).recipe().dataset.data_root for run in runs])
