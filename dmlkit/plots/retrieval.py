"""Panel of queries with their nearest images, which are marked as right or wrong."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dmlkit.errors import UserError
from dmlkit.evaluation.evaluate import score_dataset
from dmlkit.evaluation.mistakes import worst_queries
from dmlkit.files.pictures import COLUMN, picture, shortened_apart
from dmlkit.metrics.retrieval import MapAtRConfig
from dmlkit.plots.split import EmbeddedSplit
from dmlkit.vectors.in_memory import Embeddings
from dmlkit.vectors.progress_bar import Bar, no_bar

METRIC = "map@r"
SIDE = 160  # pixels of an image: 300 dpi in 13 mm
HEADING, LINE, GAP = 5.0, 1.9, 0.8  # mm: height of a heading, height of a line below an image, gap between images
RIGHT, WRONG = ("✓", "#0072b2", "-"), ("✗", "#d55e00", (0, (2.5, 1.2)))  # sign, color and dashes of a frame
MM_A_CHARACTER = 1.12  # a digit of 5 points


class RetrievalPanel(NamedTuple):
    """Queries and their neighbors, as rows of an `EmbeddedSplit`."""

    queries: Tensor  # (P,) int64, first the worst queries, then random ones
    values: Tensor  # (P,) float64, map@r of each query
    worst: int  # number of worst queries
    neighbors: Tensor  # (P, k) int64, nearest first; -1 if there are no more
    similarities: Tensor  # (P, k) float64


def plot_retrieval(
    embedded: EmbeddedSplit, output: Path, *, queries: int, neighbors: int, bar: Bar = no_bar
) -> RetrievalPanel:
    """Draw queries with their nearest images; half of the queries are the worst ones, half are random.

    If the split has queries and a gallery, the queries search the gallery.
    """
    embedded.require_images("plot retrieval")
    panel = retrieval_panel(embedded, queries, neighbors, bar)
    draw_panel(embedded, panel, output)
    return panel


@torch.no_grad()
def retrieval_panel(embedded: EmbeddedSplit, queries: int, neighbors: int, bar: Bar) -> RetrievalPanel:
    """Choose the worst queries by map@r, at most two per class, and as many random ones, and find their neighbors."""
    rows, dataset = embedded.rows, embedded.dataset
    embeddings = Embeddings(embedded.points, embedded.labels, rows, [])
    try:
        with bar("ranking", len(rows)) as advance:
            space, ranks = embedded.trained.manifold, embedded.ranks
            scores = score_dataset(embeddings, dataset, space, [MapAtRConfig()], ranks=ranks, advance=advance).scores
    except ValueError as error:
        raise UserError(f"cannot search in the {embedded.split} split: {error}") from error
    scored = torch.arange(len(rows)) if dataset.query is None else dataset.query[rows].nonzero()[:, 0]
    stored = torch.arange(len(rows)) if dataset.gallery is None else dataset.gallery[rows].nonzero()[:, 0]
    scored, nearest, values = scored[scores.queries], stored[scores.nearest], scores.per_query[METRIC]
    points, labels = embedded.points, embedded.labels
    similarities = embedded.manifold.paired_similarity(points[scored].double(), points[nearest].double())
    worst = worst_queries(values, labels[scored], labels[nearest], similarities, -(-queries // 2))
    others = other_queries(worst, len(values), queries - len(worst))
    chosen = torch.cat([worst, others])
    neighborhoods = [nearest_of(embedded, int(row), stored, neighbors) for row in scored[chosen].tolist()]
    similarities, indices = (torch.stack(column) for column in zip(*neighborhoods, strict=True))
    return RetrievalPanel(scored[chosen], values[chosen], len(worst), indices, similarities)


def other_queries(worst: Tensor, among: int, count: int) -> Tensor:
    """Draw the positions of ``count`` queries other than the worst ones, or of all if there are fewer."""
    order = torch.randperm(among, generator=torch.Generator().manual_seed(0))
    return order[~torch.isin(order, worst)][:count]


def nearest_of(embedded: EmbeddedSplit, query: int, stored: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the similarities (k,) and rows (k,) of the nearest neighbors of a query among stored rows (G,).

    The query itself and images of its own group are excluded, as in evaluation.
    """
    group_of = embedded.dataset.groups_of(embedded.rows)
    candidates = stored[(group_of[stored] != group_of[query]) & (stored != query)]
    points = embedded.points
    similarities = embedded.manifold.paired_similarity(points[query].double(), points[candidates].double())
    order = similarities.argsort(descending=True, stable=True)[:k]
    missing = k - len(order)
    return (
        torch.nn.functional.pad(similarities[order], (0, missing), value=-torch.inf),
        torch.nn.functional.pad(candidates[order], (0, missing), value=-1),
    )


def draw_panel(embedded: EmbeddedSplit, panel: RetrievalPanel, output: Path) -> None:
    """Draw one row per query with its neighbors, whose frames show right or wrong by sign, dashes and color."""
    columns = panel.neighbors.shape[1] + 1
    side = (COLUMN - (columns + 2) * GAP) / columns
    sections = [(f"Worst queries by {METRIC}", range(panel.worst))]
    sections.append(("Random queries", range(panel.worst, len(panel.queries))))
    sections = [(text, rows) for text, rows in sections if rows]
    labels = embedded.labels.tolist()
    rows = [*panel.queries.tolist(), *panel.neighbors.flatten().tolist()]
    shown = sorted({labels[row] for row in rows if row >= 0})
    characters = int(side / MM_A_CHARACTER)
    short = shortened_apart([embedded.dataset.class_names[label] for label in shown], 2 * characters - 2)
    names = {label: name_lines(name, characters) for label, name in zip(shown, short, strict=True)}
    caption = (1.5 + max(map(len, names.values()))) * LINE
    height = (len(sections) + 1) * HEADING + len(panel.queries) * (side + caption)
    with picture(output, height) as figure:
        figure.set_layout_engine("none")
        axes = figure.add_axes((0, 0, 1, 1))
        axes.axis("off")
        top = 0.0
        for text, rows in sections:
            axes.text(GAP, top + HEADING - 1, f"{text}, and their neighbors ({embedded.split} split)", va="bottom")
            top += HEADING
            for row in rows:
                query = int(panel.queries[row])
                lines = [f"{METRIC} {float(panel.values[row]):.2f}", *names[labels[query]]]
                draw_image(axes, embedded.image(query, SIDE), (GAP, top, side), lines, ("", "k", "-"))
                for rank, index in enumerate(panel.neighbors[row].tolist()):
                    if index < 0:
                        continue
                    look = RIGHT if labels[index] == labels[query] else WRONG
                    lines = [f"{look[0]} {float(panel.similarities[row, rank]) + 0.0:.2f}", *names[labels[index]]]
                    left = 2 * GAP + (rank + 1) * (side + GAP)
                    draw_image(axes, embedded.image(index, SIDE), (left, top, side), lines, look)
                top += side + caption
        texts = ((RIGHT, "solid: same class"), (WRONG, "dashed: other class"))
        same, other = (f"{look[0]} {text}" for look, text in texts)
        measure = embedded.manifold.similarity_name.replace("_", " ")
        axes.text(GAP, top + HEADING - 1, f"{same};  {other};  number: {measure}", va="bottom", fontsize=6)
        axes.set(xlim=(0, COLUMN), ylim=(height, 0))


def draw_image(axes: Any, pixels: Any, place: tuple[float, float, float], lines: list[str], look: Any) -> None:
    """Draw an image in a framed square (left, top, side) with lines of text below; ``?`` if it cannot be read."""
    from matplotlib.patches import Rectangle

    left, top, side = place
    if pixels is None:
        axes.text(left + side / 2, top + side / 2, "?", ha="center", va="center")
    else:
        high, wide = (side * size / max(pixels.shape[:2]) for size in pixels.shape[:2])
        x, y = left + (side - wide) / 2, top + (side - high) / 2
        axes.imshow(pixels, extent=(x, x + wide, y + high, y), aspect="auto")
    frame: dict[str, Any] = {"edgecolor": look[1], "linestyle": look[2], "linewidth": 1.2, "fill": False}
    axes.add_patch(Rectangle((left, top), side, side, **frame))
    for line, text in enumerate(lines):
        axes.text(left + side / 2, top + side + 0.6 + LINE * line, text, ha="center", va="top", fontsize=5)


def name_lines(name: str, most: int) -> list[str]:
    """Split a name into one or two lines, the first of at most ``most`` characters, after a word if possible."""
    if len(name) <= most:
        return [name]
    ends = [index + 1 for index, letter in enumerate(name[:most]) if letter in " -_/" and len(name) - index - 1 <= most]
    end = ends[-1] if ends else most
    return [name[:end], name[end:]]
