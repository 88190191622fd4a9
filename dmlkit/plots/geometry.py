"""Drawings of maps of embeddings: Poincaré disk, PCA or t-SNE, with dots or the images themselves."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from dmlkit.errors import UserError
from dmlkit.files.pictures import COLUMN, picture, shortened_apart
from dmlkit.manifolds.base import Manifold
from dmlkit.plots.planes import draw_disk, neighbor_plane, principal_plane, require_disk, to_unit_disk
from dmlkit.plots.split import ClassProxies, EmbeddedSplit
from dmlkit.run_folder.folder import RunFolder
from dmlkit.vectors.progress_bar import Bar, no_bar

MapKind = Literal["disk", "pca", "tsne"]
TITLES: dict[MapKind, str] = {"disk": "Poincaré disk", "pca": "PCA of the features", "tsne": "t-SNE of the distances"}
AXES: dict[MapKind, tuple[str, str]] = {
    "pca": ("first principal direction", "second principal direction"),
    "tsne": ("coordinates have no unit; nearby images are similar", ""),
}
LONGEST_NAME = 26  # characters of a class name in the legend, which has two columns
MOST_NAMES = 30  # in a legend
ROW = 3.0  # mm, height of a row of the legend
MARKERS = "os^DvP*"  # 7, so that classes of similar hues differ in shape
GRID = 22  # images along a map, 3.4 mm each
SIDE = 48  # pixels of such an image


class Mapped(NamedTuple):
    """Contents of a map."""

    points: Tensor  # (N, D)
    labels: Tensor  # (N,) int64
    names: tuple[str, ...]  # of the classes
    proxies: ClassProxies | None = None
    image: Callable[[int], Any] | None = None  # pixels (H, W, 3) of a point or None; if None, all points are dots


def plot_embeddings(
    manifold: Manifold, shown: Mapped, kind: MapKind, path: Path, title: str, bar: Bar = no_bar
) -> None:
    """Draw embeddings, colored by class, as PNG, SVG or PDF.

    Args:
        shown: the points. Images are drawn where they do not cover each other; the other points are dots.
        kind: ``disk`` (2-d hyperbolic embeddings, each joined to the centroid of its class by a geodesic), ``pca`` (the
            two principal directions; in a curved space those of the tangent vectors at the origin) or ``tsne`` (t-SNE
            of the manifold's distances).
    """
    points, labels = shown.points, shown.labels
    if len(points) < 3:
        raise UserError(f"plot: expected at least 3 embeddings, got {len(points)}")
    whole = points if shown.proxies is None else torch.cat([points, shown.proxies.points])
    everywhere = place_of(manifold, whole, kind, bar)
    place, of_proxies = everywhere[: len(points)], everywhere[len(points) :]
    present = labels.unique().tolist()
    named = present if len(present) <= MOST_NAMES else []
    legend_rows = -(-len(named) // 2) + (shown.proxies is not None)
    with picture(path, COLUMN + 6 + ROW * legend_rows) as figure:
        axes = figure.subplots()
        axes.set_aspect("equal", adjustable="box" if kind == "disk" else "datalim")
        axes.set(title=f"{TITLES[kind]}, {title}")
        colors = {label: color(position, len(present)) for position, label in enumerate(present)}
        if kind == "disk":
            draw_disk(axes, place, labels, colors)
        else:
            axes.set(xticks=[], yticks=[], xlabel=AXES[kind][0], ylabel=AXES[kind][1])
        dots: list[Any] = []
        for position, label in enumerate(present):
            look: dict[str, Any] = {"color": colors[label], "marker": MARKERS[position % len(MARKERS)]}
            chosen = place[labels == label]
            dots.append(axes.scatter(chosen[:, 0], chosen[:, 1], s=5, linewidths=0, zorder=2, **look))
        if shown.image is not None:
            draw_images(axes, place, [colors[label] for label in labels.tolist()], shown.image)
        names = [shown.names[label] for label in named]
        if shown.proxies is not None:
            look = {"c": [colors[label] for label in shown.proxies.labels.tolist()], "marker": "*"}
            look |= {"edgecolors": "k", "linewidths": 0.5}  # visible on any background
            star = axes.scatter(of_proxies[:, 0], of_proxies[:, 1], s=30, zorder=4, **look)
            dots, names = [*dots[: len(named)], star], [*names, "proxies"]
        if names:
            draw_legend(figure, dots, names)


def place_of(manifold: Manifold, points: Tensor, kind: MapKind, bar: Bar = no_bar) -> Tensor:
    """Compute the coordinates (N, 2) of points (N, D) on a map."""
    if kind == "disk":
        return to_unit_disk(manifold, points)
    if kind == "pca":
        return principal_plane(manifold, points)
    with bar("t-SNE", len(points)) as advance:
        return neighbor_plane(manifold, points, advance=advance)


def with_room(place: Tensor, room: float) -> list[int]:
    """Choose rows at which images do not cover each other: the first, and each later one that has room."""
    rows: list[int] = []
    for index in range(len(place)):
        if not rows or bool(((place[rows] - place[index]).abs().amax(1) > room).all()):
            rows.append(index)
    return rows


def draw_images(axes: Any, place: Tensor, colors: list[Any], image: Callable[[int], Any]) -> None:
    """Draw images at their points without overlap, each in a frame of its class's color."""
    from matplotlib.offsetbox import AnnotationBbox, OffsetImage

    room = max(axes.viewLim.width, axes.viewLim.height) / (GRID - 2)
    for index in with_room(place, room):
        pixels = image(index)
        if pixels is None:
            continue
        zoom = 0.85 * 72 * (COLUMN / 25.4 / GRID) / max(pixels.shape[:2])  # OffsetImage counts 72 pixels an inch
        frame = {"edgecolor": colors[index], "linewidth": 0.8}
        box, (x, y) = OffsetImage(pixels, zoom=zoom), place[index].tolist()
        axes.add_artist(AnnotationBbox(box, (x, y), pad=0.05, bboxprops=frame, zorder=3))


def draw_legend(figure: Any, dots: list[Any], names: list[str]) -> None:
    """Draw a legend of literal names; matplotlib would leave out names that begin with _ and read $ as mathematics."""
    legend = figure.legend(dots, ["name"] * len(dots), loc="outside lower center", ncols=2, frameon=False)
    for text, name in zip(legend.get_texts(), shortened_apart(names, LONGEST_NAME), strict=True):
        text.set(text=name, parse_math=False)


def color(position: int, count: int) -> tuple[float, float, float]:
    """Return the color of a class out of ``count``: hues are evenly spread, alternately light and dark."""
    from matplotlib.colors import hsv_to_rgb

    return tuple(hsv_to_rgb((position / count, 0.75, 0.85 if position % 2 else 0.6)))


def check_map(run: Path, kind: MapKind) -> None:
    """Check, before anything is embedded, that a map can be drawn of a run."""
    recipe = RunFolder(run).recipe()
    if kind == "disk":
        require_disk(recipe.manifold.build(recipe.embedding_dim))


def plot_map(
    embedded: EmbeddedSplit, output: Path, *, kind: MapKind, classes: int, images: bool, bar: Bar = no_bar
) -> EmbeddedSplit:
    """Draw a map of some classes of a run, with the proxies of training classes, see `plot_embeddings`; return them."""
    if images:
        embedded.require_images(f"plot {kind} --thumbnails")
    shown = embedded.of_classes(classes)
    image = partial(shown.image, side=SIDE) if images else None
    mapped = Mapped(shown.points, shown.labels, shown.dataset.class_names, shown.proxies(), image)
    plot_embeddings(shown.manifold, mapped, kind, output, f"{embedded.split} split", bar)
    return shown
