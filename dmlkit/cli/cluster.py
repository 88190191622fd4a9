"""``dmlkit cluster``."""

from typing import TYPE_CHECKING, Annotated, Literal

from rich.console import Console

from dmlkit.cli.console import bars, counted, image_cell, print_table, say, say_skipped
from dmlkit.cli.option_groups import SourceOptions
from dmlkit.cli.options import PAGE, Files, SourcePath, command
from dmlkit.cli.search import tell_page

if TYPE_CHECKING:
    from dmlkit.identify.clusters import Clusters

MOST_SHOWN = 15  # clusters printed in the terminal


@command(
    "dmlkit cluster embeddings/photos -k 50 -o page.html",
    "dmlkit cluster runs/demo --threshold 0.7",
    "dmlkit cluster runs/demo --method hdbscan -o clusters.csv",
)
def cluster(
    source: SourcePath,
    /,
    k: Annotated[int | None, "COUNT", "Number of clusters (kmeans, agglomerative)."] = None,
    threshold: Annotated[
        float | None,
        "SIMILARITY",
        "For agglomerative: minimum similarity of any two images in a cluster. For hdbscan: images at least this "
        "similar are not split.",
    ] = None,
    method: Annotated[
        Literal["kmeans", "agglomerative", "hdbscan"] | None,
        "METHOD",
        "Method: kmeans, agglomerative or hdbscan. Default: kmeans with -k, else agglomerative.",
    ] = None,
    output: Files = None,
    *,
    points: SourceOptions,
) -> None:
    """Cluster images by their embeddings."""
    from dmlkit.identify.clusters import cluster as find_clusters
    from dmlkit.identify.clusters import clustering_method
    from dmlkit.identify.page import write_page
    from dmlkit.vectors.points import in_memory

    console = Console()
    method = clustering_method(k, threshold, method)  # refuses before a run is embedded
    collection = in_memory(points.open(source, bars(console)))
    with bars(console)("clustering", len(collection)) as progress:
        found = find_clusters(collection, clusters=k, threshold=threshold, method=method, advance=progress)
    print_clusters(found, console)
    say_skipped(console, collection.skipped)
    for path in output or []:
        if path.suffix.lower() == PAGE:
            title, notes = f"clusters of {source}", [summary_of(found), "The first picture of each row is the medoid."]
            gone = write_page(path, title, notes, found.shelves(), rows="clusters")
            tell_page(path, gone, len(found.members), console, [source], rows="clusters")
        else:
            found.write(path)
            say(console, f"wrote {path}")


def print_clusters(found: "Clusters", console: Console) -> None:
    """Print the largest clusters, and how they agree with labels."""
    rows: list[list[str | list[str]]] = [["cluster", "images", "label", "share", "path"]]
    for number, (members, most) in enumerate(zip(found.members, found.majorities(), strict=True), start=1):
        if number > MOST_SHOWN:
            break
        label, share = ("", "") if most is None else (most[0], f"{most[1] / len(members):.0%}")
        medoid = int(members[0])
        image = image_cell(found.collection.paths[medoid], found.collection.boxes[medoid])
        rows.append([str(number), str(len(members)), label, share, image])
    print_table(rows, console, f"clusters of {found.collection.source}, each with its medoid")
    if len(found.members) > MOST_SHOWN:
        say(console, f"the largest {MOST_SHOWN} are shown; -o FILE.csv and -o FILE.html contain all")
    say(console, summary_of(found))


def summary_of(found: "Clusters") -> str:
    """Return a line on all clusters."""
    line = f"{counted(len(found.collection), 'image')} in {counted(len(found.members), 'cluster')}"
    if found.noise:
        line += f", {found.noise} in no cluster"
    purity, nmi = found.purity(), found.nmi()
    if purity is None:
        return line
    several = "no nmi, since images have several labels"
    return f"{line}: purity {purity:.4f}, {several if nmi is None else f'nmi {nmi:.4f}'}"
