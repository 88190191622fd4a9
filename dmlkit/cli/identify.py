"""``dmlkit identify``."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from dmlkit.cli.options import (
    USE,
    ArrayLabels,
    ArrayManifold,
    Debug,
    Device,
    Plugins,
    QueryPath,
    QueryRun,
    SourcePath,
    examples,
)

if TYPE_CHECKING:
    from rich.console import Console

    from dmlkit.embedding.questions.identify import Identified

app = typer.Typer()


@app.command(
    rich_help_panel=USE, epilog=examples("dmlkit identify galleries/birds photos/ -o answers.csv --threshold 0.6")
)
def identify(
    source: SourcePath,
    images: QueryPath,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="CSV table to write.", show_default=False)
    ],
    by: Annotated[
        Literal["nearest", "vote", "mean"],
        typer.Option(
            metavar="RULE",
            help="Rule for the label: nearest (image), vote (of the -k nearest), or mean (the nearest class mean).",
        ),
    ] = "nearest",
    k: Annotated[
        int | None,
        typer.Option(
            "-k", metavar="COUNT", help="Number of images that vote (--by vote). Default: 5.", show_default=False
        ),
    ] = None,
    threshold: Annotated[
        float | None,
        typer.Option(
            metavar="SIMILARITY",
            help="Similarity below which an image is unknown. Default: that of the gallery, or of its calibrated run.",
            show_default=False,
        ),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="HTML page with pictures to write.", show_default=False)
    ] = None,
    run: QueryRun = None,
    labels: ArrayLabels = None,
    manifold: ArrayManifold = None,
    device: Device = "auto",
    plugins: Plugins = None,
    debug: Debug = False,
) -> None:
    """Find the label of each image among labeled images, e.g. of a gallery, or report the image as unknown."""
    from rich.console import Console

    from dmlkit.cli.console import counted, say
    from dmlkit.cli.progress import bars
    from dmlkit.embedding.gallery.images import UNKNOWN
    from dmlkit.embedding.questions.answers import check_table
    from dmlkit.embedding.questions.identify import ANSWER_COLUMNS
    from dmlkit.embedding.questions.identify import identify as identify_images
    from dmlkit.embedding.questions.page import check_page

    check_table(output, ANSWER_COLUMNS, option="--output")
    if html is not None:
        check_page(html, option="--html")
    console = Console()
    found = identify_images(
        source,
        images,
        by=by,
        k=k,
        threshold=threshold,
        run=run,
        labels=labels,
        manifold=manifold,
        device=device,
        bar=bars(console),
    )
    found.write(output)
    unknown = sum(answer.label == UNKNOWN for answer in found.answers)
    say(console, f"{counted(len(found.answers), 'image', 'images')}, {unknown} unknown: wrote {output}")
    size = len(found.neighbors.searched)
    if k is not None and k > size:
        say(console, f"note: -k {k} is reduced to {size}, the number of images in {source}")
    if found.threshold is None:
        say(console, "note: without a threshold no image is unknown; use --threshold, or calibrate the run first")
    skipped = found.neighbors.skipped
    if skipped:
        say(console, f"{counted(len(skipped), 'image', 'images')} could not be read: {skipped[0]}")
    if html is not None:
        write_answers_page(found, html, f"{images} in {source}", console)


def write_answers_page(found: "Identified", path: Path, title: str, console: "Console") -> None:
    """Write the page of the answers, and print how many pictures are missing."""
    from dmlkit.cli.search import tell_page
    from dmlkit.embedding.questions.page import Picture, Shelf, write_page

    shelves = (
        Shelf(
            Picture(path, [answer.label, f"score {answer.score:.4f}", f"margin {_number(answer.margin)}"]),
            [
                Picture(item.path, [item.label or "", f"{rank}.  {similarity:.4f}"], item.thumbnail)
                for rank, similarity, item in neighbors
            ],
        )
        for answer, (path, neighbors) in zip(found.answers, found.neighbors.neighbors(), strict=True)
    )
    notes = [f"{len(found.answers)} images; unknown below a score of {_number(found.threshold)}"]
    tell_page(path, write_page(path, title, notes, shelves), len(found.answers), console)


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4f}"
