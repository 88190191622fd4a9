"""Pictures of embeddings: the Poincaré disk with geodesics, PCA and t-SNE."""

import warnings
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from dmlkit.embedding.in_memory import Bar, no_bar
from dmlkit.errors import UserError
from dmlkit.files.atomic import atomic_write
from dmlkit.files.escape import excerpt, printable
from dmlkit.files.outputs import picture_metadata, writing
from dmlkit.geometry.neighbor_plane import neighbor_plane
from dmlkit.geometry.principal_plane import principal_plane
from dmlkit.manifolds.base import Manifold
from dmlkit.manifolds.lorentz import Lorentz
from dmlkit.manifolds.poincare import Poincare

Kind = Literal["disk", "pca", "tsne"]
LONGEST_NAME = 40  # characters of a class in the legend
ARC_POINTS = 30  # of a drawn geodesic
MARKERS = "os^DvP*"  # 7, so that classes of like hues differ in shape


def plot_embeddings(
    manifold: Manifold,
    points: Tensor,
    labels: Tensor,
    names: tuple[str, ...],
    kind: Kind,
    path: Path,
    bar: Bar = no_bar,
) -> None:
    """Draw embeddings, coloured by class, as PNG or SVG.

    Args:
        manifold: the geometry of the points.
        points: (N, D).
        labels: (N,) int64.
        names: of the classes.
        kind: ``disk`` (2-d hyperbolic embeddings as they are, each joined to the centroid of its class by a
            geodesic), ``pca`` (the two main directions, of the tangent vectors at the origin where the space is
            curved) or ``tsne`` (of the manifold's distances).
        path: ends in .png or .svg.
        bar: shows t-SNE.

    Raises:
        UserError: the disk is asked for embeddings that do not lie in it, or there are too few points, or not finite.
    """
    from matplotlib.figure import Figure

    if len(points) < 3:
        raise UserError(f"plot: expected at least 3 embeddings, got {len(points)}")
    if not points.isfinite().all():
        raise UserError("plot: some embeddings are not finite: the weights are damaged, or training has diverged")
    figure = Figure(figsize=(8, 7), layout="constrained")
    axes = figure.subplots()
    axes.set_aspect("equal", adjustable="datalim")
    if kind == "disk":
        place = to_unit_disk(manifold, points)
        draw_disk(axes, place, labels)
    else:
        if kind == "pca":
            place = principal_plane(manifold, points)
        else:
            with bar("t-SNE", len(points)) as advance:
                place = neighbor_plane(manifold, points, advance=advance)
        axes.set(xticks=[], yticks=[])
    shown = labels.unique().tolist()
    dots: list[Any] = []
    for position, label in enumerate(shown):
        chosen = place[labels == label]
        look: dict[str, Any] = {"color": color(position, len(shown)), "marker": MARKERS[position % len(MARKERS)]}
        dots.append(axes.scatter(chosen[:, 0], chosen[:, 1], s=14, zorder=2, **look))
    if len(shown) <= 30:
        draw_legend(axes, dots, [names[label] for label in shown])
    path.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # one a character; the legend shows boxes
        with writing(path), atomic_write(path) as partial:
            figure.savefig(partial, dpi=150, format=path.suffix[1:].lower(), metadata=picture_metadata(path))


def draw_legend(axes: Any, dots: list[Any], names: list[str]) -> None:
    """A legend of names as they are: matplotlib leaves out those that begin with _ and reads $ as mathematics."""
    legend = axes.legend(dots, ["name"] * len(dots), loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    for text, name in zip(legend.get_texts(), names, strict=True):
        text.set(text=printable(excerpt(name, LONGEST_NAME)), parse_math=False, fontsize="small")


def default_kind(manifold: Manifold) -> Kind:
    """The disk for embeddings that lie in it, else PCA."""
    return "disk" if isinstance(manifold, Poincare | Lorentz) and manifold.dim == 2 else "pca"


def color(position: int, count: int) -> tuple[float, float, float]:
    """A colour of its own for each of ``count`` classes: hues evenly spread, light and dark in turn."""
    from matplotlib.colors import hsv_to_rgb

    return tuple(hsv_to_rgb((position / count, 0.75, 0.85 if position % 2 else 0.6)))


def to_unit_disk(manifold: Manifold, points: Tensor) -> Tensor:
    """Points (N, 2) of the unit disk, an isometry up to the scale of the curvature.

    Raises:
        UserError: the manifold is another, or the points are not 2-d.
    """
    if not isinstance(manifold, Poincare | Lorentz) or manifold.dim != 2:
        raise UserError(
            f"plot: the disk shows 2-d embeddings on poincare or lorentz, got {manifold.dim}-d on "
            f"{type(manifold).__name__.lower()}; use --kind pca or --kind tsne"
        )
    root = (-manifold.curvature.detach()).sqrt()
    if isinstance(manifold, Poincare):
        return root * points
    return root * points[:, 1:] / (1 + root * points[:, :1])


def draw_disk(axes: Any, place: Tensor, labels: Tensor) -> None:
    """The boundary, and a geodesic from the centroid of each class to each of its points."""
    from matplotlib.collections import LineCollection
    from matplotlib.patches import Circle

    axes.add_patch(Circle((0, 0), 1, fill=False, color="0.3"))
    axes.set(xlim=(-1.05, 1.05), ylim=(-1.05, 1.05))
    axes.axis("off")
    shown = labels.unique().tolist()
    for position, label in enumerate(shown):
        chosen = place[labels == label]
        arcs = list(geodesics(centroid(chosen), chosen).numpy())
        axes.add_collection(LineCollection(arcs, colors=[color(position, len(shown))], linewidths=0.5, alpha=0.5))


def lift(place: Tensor) -> Tensor:
    """Points (..., 3) of the hyperboloid with K = -1 above points (..., 2) of the unit disk."""
    squared = place.double().square().sum(-1, keepdim=True)
    return torch.cat([1 + squared, 2 * place], dim=-1) / (1 - squared)


def lower(space: Tensor) -> Tensor:
    """Points (..., 2) of the unit disk under the rays through timelike vectors (..., 3)."""
    length = (space[..., :1].square() - space[..., 1:].square().sum(-1, keepdim=True)).clamp(min=1e-12).sqrt()
    return space[..., 1:] / (length + space[..., :1])


def centroid(place: Tensor) -> Tensor:
    """The hyperbolic centroid (2,) of points (N, 2): the ray through the mean on the hyperboloid."""
    return lower(lift(place).mean(0))


def geodesics(start: Tensor, ends: Tensor) -> Tensor:
    """Arcs (N, 30, 2) from one point (2,) to points (N, 2): straight lines on the rays of the hyperboloid.

    Example:
        >>> arc = geodesics(torch.tensor([0.5, 0.0]), torch.tensor([[0.0, 0.5]]))[0]
        >>> [round(x, 6) for x in arc[0].tolist()], bool(arc.norm(dim=1).min() < 0.354)  # it bends towards the origin
        ([0.5, 0.0], True)
    """
    share = torch.linspace(0, 1, ARC_POINTS, dtype=torch.float64)[:, None]
    return lower((1 - share) * lift(start) + share * lift(ends)[:, None])
