"""``dmlkit search``."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dmlkit.cli.options import Debug, Device, Json, Plugins

if TYPE_CHECKING:
    from rich.console import Console

    from dmlkit.embedding.questions.answers import Answers

app = typer.Typer()
MOST_SHOWN = 10  # queries in the terminal


@app.command(
    epilog="Examples:  dmlkit search embeddings/photos new.jpg --run runs/demo    dmlkit search embeddings/photos "
    "embeddings/new -k 5 --html page.html"
)
def search(
    source: Annotated[
        Path,
        typer.Argument(metavar="EMBEDDINGS|GALLERY", help="Where to search: what embed or gallery create wrote."),
    ],
    queries: Annotated[
        Path,
        typer.Argument(metavar="IMAGES|EMBEDDINGS", help="An image, a folder of images, or one that embed wrote."),
    ],
    k: Annotated[int, typer.Option("-k", help="How many neighbours of each.")] = 10,
    exact: Annotated[
        bool, typer.Option("--exact", help="Look at every image, also of a gallery that has an index.")
    ] = False,
    run: Annotated[
        Path | None,
        typer.Option(
            help="Run that embeds images; by default the one that EMBEDDINGS lie in, or the gallery's.",
            show_default=False,
        ),
    ] = None,
    csv: Annotated[Path | None, typer.Option(help="CSV file to write all neighbours to.", show_default=False)] = None,
    html: Annotated[Path | None, typer.Option(help="Page of pictures to write.", show_default=False)] = None,
    json: Json = False,
    device: Device = "auto",
    plugins: Plugins = None,
    debug: Debug = False,
) -> None:
    """Find the images that are most like others: exactly, unless gallery index was run."""
    from rich.console import Console

    from dmlkit.cli.console import counted, say, say_json
    from dmlkit.cli.progress import bars
    from dmlkit.embedding.questions.answers import NEIGHBOR_COLUMNS, check_table, write_neighbors
    from dmlkit.embedding.questions.page import check_page
    from dmlkit.embedding.questions.search import search as search_images

    if csv is not None:
        check_table(csv, NEIGHBOR_COLUMNS, option="--csv")
    if html is not None:
        check_page(html, option="--html")
    console = Console(stderr=json)
    answers = search_images(source, queries, k=k, exact=exact, run=run, device=device, bar=bars(console))
    if json:
        say_json(answers.plain())
    else:
        print_neighbors(answers, console)
    if answers.index is not None:
        say(
            console,
            f"note: found by {answers.index.kind}, measured recall {answers.index.recall:.4f}; --exact finds all",
        )
    if answers.k < k:
        say(console, f"note: -k {k} is cut to {answers.k}, all that {source} holds")
    if answers.skipped:
        say(console, f"{counted(len(answers.skipped), 'image', 'images')} could not be read: {answers.skipped[0]}")
    if csv is not None:
        write_neighbors(answers, csv)
        say(console, f"wrote {csv}")
    if html is not None:
        write_neighbors_page(answers, html, f"{queries} in {source}", console)


def print_neighbors(answers: "Answers", console: "Console") -> None:
    """A table for each query; of many queries for the first ones."""
    from itertools import islice

    from dmlkit.cli.console import print_table, say

    for path, neighbors in islice(answers.neighbors(), MOST_SHOWN):
        rows = [[str(rank), f"{similarity:.4f}", item.label or "", item.path] for rank, similarity, item in neighbors]
        print_table([["rank", "similarity", "label", "path"], *rows], console, path)
    more = len(answers.queries) - MOST_SHOWN
    if more > 0:
        say(console, f"and {more} more queries; --csv FILE, --html FILE and --json tell of all")


def write_neighbors_page(answers: "Answers", path: Path, title: str, console: "Console") -> None:
    """The page of a search, and how many pictures it lacks."""
    from dmlkit.cli.console import counted
    from dmlkit.embedding.questions.page import Picture, Shelf, write_page

    shelves = (
        Shelf(
            Picture(query),
            [
                Picture(item.path, [item.label or "", f"{rank}.  {similarity:.4f}"], item.thumbnail)
                for rank, similarity, item in neighbors
            ],
        )
        for query, neighbors in answers.neighbors()
    )
    notes = [
        f"{counted(len(answers.queries), 'query', 'queries')}, the {answers.k} nearest of each by "
        f"{answers.searched.manifest.similarity.replace('_', ' ')}, nearest first"
    ]
    tell_page(path, write_page(path, title, notes, shelves), len(answers.queries), console)


def tell_page(path: Path, gone: int, count: int, console: "Console", *, rows: str = "queries") -> None:
    """Where a page is, and what it lacks."""
    from dmlkit.cli.console import counted, say
    from dmlkit.embedding.questions.page import MOST

    say(console, f"wrote {path}" + (f": the first {MOST} {rows}" if count > MOST else ""))
    if gone:
        told = counted(gone, "picture is a placeholder", "pictures are placeholders")
        say(console, f"note: {told}: no image is where it was")
