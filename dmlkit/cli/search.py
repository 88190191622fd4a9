"""``dmlkit search``."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from dmlkit.cli.console import bars, counted, image_cell, print_table, say, say_json, say_skipped
from dmlkit.cli.option_groups import BoxOptions, FusedModelOptions
from dmlkit.cli.options import (
    PAGE,
    ArrayManifold,
    Conditions,
    Files,
    Json,
    QueryPath,
    RerankMethod,
    SourcePath,
    command,
)
from dmlkit.errors import UserError
from dmlkit.files.source import kind_of

if TYPE_CHECKING:
    from dmlkit.identify.answers import Answers, Neighbor
    from dmlkit.identify.page import Picture, Shelf
    from dmlkit.metrics.ranking.rerank import Rerank

MOST_SHOWN = 10  # queries printed in the terminal


@command(
    "dmlkit search embeddings/photos new.jpg",
    "dmlkit search embeddings/photos embeddings/new -k 5 -o page.html",
    "dmlkit search embeddings/photos new.jpg --rerank expansion",
)
def search(
    source: SourcePath,
    queries: QueryPath,
    /,
    k: Annotated[int, "COUNT", "Number of neighbors per query."] = 10,
    exact: Annotated[bool, "Compare with every image, even if the gallery has an index."] = False,
    rerank: RerankMethod = None,
    where: Conditions = None,
    *,
    boxes: BoxOptions,
    chosen: FusedModelOptions,
    output: Files = None,
    manifold: ArrayManifold = None,
    json: Json = False,
) -> None:
    """Find the nearest neighbors of images in a gallery, a run or other embeddings.

    In a run, the images of its test split are searched; to search others, run
    dmlkit embed first. The search is exact, unless the gallery has an index.
    """
    from dmlkit.identify.answers import write_neighbors
    from dmlkit.identify.search import search as search_images

    answers = search_images(
        source,
        queries,
        k=k,
        method=rerank_of(rerank) or ("exact" if exact else "index"),
        manifold=manifold,
        boxes=boxes.read(where),
        model=chosen.choose(source, queries),
        bar=bars(),
    )
    written = write_files(
        output, lambda path: write_neighbors_page(answers, path, (queries, source)), partial(write_neighbors, answers)
    )
    if json:
        say_json(answers.plain())
    else:
        print_neighbors(answers)
    if kind_of(source) == "run":
        images = counted(len(answers.searched), "image")
        say(f"searched: {images} of the {answers.searched.source}; dmlkit embed adds others")
    if answers.rerank is not None:
        say("note: re-ranking looks at the gallery as a whole, and at no other query")
    if answers.index is not None:
        how = f"found by {answers.index.kind}, measured recall {answers.index.recall:.4f}"
        say(f"note: {how}; use --exact for all")
    if answers.k < k:
        say(f"note: -k {k} is reduced to {answers.k}, the number of images in {source}")
    say_skipped(answers.skipped)
    for line in written:
        say(line)


def print_neighbors(answers: "Answers") -> None:
    """Print a table of neighbors for each of the first queries."""
    for box, (path, neighbors) in islice(zip(answers.boxes, answers.neighbors(), strict=True), MOST_SHOWN):
        rows = [
            [str(rank), f"{similarity:.4f}", item.label or "", image_cell(item.path, item.box)]
            for rank, similarity, item in neighbors
        ]
        print_table([["rank", "similarity", "label", "path"], *rows], path if box is None else f"{path}, {box.sides}")
    more = len(answers.queries) - MOST_SHOWN
    if more > 0:
        say(f"and {more} more queries; -o FILE.csv, -o FILE.html and --json contain all")


def write_neighbors_page(answers: "Answers", path: Path, read: tuple[Path, Path]) -> list[str]:
    """Write the page of a search for queries in a source; return what to print, see `write_pictures`."""
    from dmlkit.identify.page import Picture, Shelf

    shelves = (
        Shelf(Picture(picture, box=box), pictures_of(neighbors))
        for picture, box, (_, neighbors) in zip(answers.pictures, answers.boxes, answers.neighbors(), strict=True)
    )
    notes = [
        f"{counted(len(answers.queries), 'query', 'queries')}, the {answers.k} nearest of each by "
        f"{answers.similarity_name.replace('_', ' ')}, nearest first"
    ]
    return write_pictures(path, f"{read[0]} in {read[1]}", notes, shelves, read)


def pictures_of(neighbors: "Iterable[Neighbor]") -> list["Picture"]:
    """Return the pictures of neighbors with their labels, ranks and similarities."""
    from dmlkit.identify.page import Picture

    return [
        Picture(item.path, [item.label or "", f"{rank}.  {similarity:.4f}"], item.thumbnail, box=item.box)
        for rank, similarity, item in neighbors
    ]


def write_files(
    paths: list[Path] | None, page: Callable[[Path], list[str]], write: Callable[[Path], object]
) -> list[str]:
    """Write files and pages before anything is printed, whose reader may end, e.g. head; return what to print."""
    written: list[str] = []
    for path in paths or []:
        if path.suffix.lower() == PAGE:
            written += page(path)
        else:
            write(path)
            written.append(f"wrote {path}")
    return written


def write_pictures(
    path: Path,
    title: str,
    notes: Sequence[str],
    shelves: "Iterable[Shelf]",
    read: Sequence[Path],
    rows: str = "queries",
) -> list[str]:
    """Write a page of some rows of pictures; return where it is and how many pictures of what was read are gone."""
    from dmlkit.identify.page import MOST, write_page

    first = list(islice(shelves, MOST + 1))
    gone = write_page(path, title, notes, first, rows=rows)
    lines = [f"wrote {path}" + (f": the first {MOST} {rows}" if len(first) > MOST else "")]
    if gone:
        missing = counted(gone, "picture is a placeholder", "pictures are placeholders")
        lines.append(f"note: {missing}: {why_missing(*read)}")
    return lines


def why_missing(*read: Path) -> str:
    """Return why pages have no pictures of some of what a command read."""
    array = next((path for path in read if kind_of(path) == "array"), None)
    return "image files were moved or deleted" if array is None else f"the rows of {array} have none"


def rerank_of(text: str | None) -> "Rerank | None":
    """Read ``--rerank``."""
    if text is None:
        return None
    from dmlkit.metrics.ranking.rerank import parse_rerank

    try:
        return parse_rerank(text)
    except ValueError as error:
        raise UserError(f"--rerank {text}: {error}") from None
