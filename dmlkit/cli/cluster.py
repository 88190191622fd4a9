"""``dmlkit cluster``."""

from typing import TYPE_CHECKING, Annotated, Literal

from dmlkit.cli.console import bars, counted, image_cell, print_table, say, say_skipped
from dmlkit.cli.option_groups import SourceOptions
from dmlkit.cli.options import Files, SourcePath, command
from dmlkit.cli.search import write_files, write_pictures

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
    from dmlkit.vectors.points import in_memory

    method = clustering_method(k, threshold, method)  # refuses before a run is embedded
    collection = in_memory(points.open(source))
    with bars()("clustering", len(collection)) as progress:
        clusters = find_clusters(collection, clusters=k, threshold=threshold, method=method, advance=progress)
    title, notes = f"clusters of {source}", [summary_of(clusters), "The first picture of each row is the medoid."]
    written = write_files(
        output,
        lambda path: write_pictures(path, title, notes, clusters.shelves(), [source], "clusters"),
        clusters.write,
    )
    rows: list[list[str | list[str]]] = [["cluster", "images", "label", "share", "path"]]
    for number, members, most in zip(range(1, MOST_SHOWN + 1), clusters.members, clusters.majorities(), strict=False):
        label, share = ("", "") if most is None else (most[0], f"{most[1] / len(members):.0%}")
        medoid = int(members[0])
        image = image_cell(collection.paths[medoid], collection.boxes[medoid])
        rows.append([str(number), str(len(members)), label, share, image])
    print_table(rows, f"clusters of {collection.source}, each with its medoid")
    if len(clusters.members) > MOST_SHOWN:
        say(f"the largest {MOST_SHOWN} are shown; -o FILE.csv and -o FILE.html contain all")
    say(summary_of(clusters))
    say_skipped(collection.skipped)
    for line in written:
        say(line)


def summary_of(clusters: "Clusters") -> str:
    """Return a line on all clusters."""
    line = f"{counted(len(clusters.collection), 'image')} in {counted(len(clusters.members), 'cluster')}"
    if clusters.noise:
        line += f", {clusters.noise} in no cluster"
    purity, nmi = clusters.purity(), clusters.nmi()
    if purity is None:
        return line
    several = "no nmi, since images have several labels"
    return f"{line}: purity {purity:.4f}, {several if nmi is None else f'nmi {nmi:.4f}'}"
