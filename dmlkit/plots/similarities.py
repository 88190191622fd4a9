"""Pictures of similarities: heat maps of samples, proxies and classes, and histograms of pairs."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dmlkit.backbones.identity import IdentityConfig
from dmlkit.errors import UserError
from dmlkit.evaluation.mistakes import ScoreHistograms, score_histograms
from dmlkit.files.pictures import COLORS, COLUMN, picture, shortened_apart
from dmlkit.manifolds.base import Manifold
from dmlkit.metrics.base import Points
from dmlkit.plots.split import EmbeddedSplit
from dmlkit.vectors.progress_bar import Bar, no_bar
from dmlkit.vectors.stored import split_embeddings
from dmlkit.vectors.trained import files_of_run, pretrained_model

MOST_NAMES = 30  # along an axis of 60 mm
LONGEST_NAME = 14


class HeatMaps(NamedTuple):
    """Similarities, ordered by class."""

    classes: Tensor  # (c,) int64, labels, ascending
    between: Tensor  # (c, c) float64, see `class_similarities`
    sample_labels: Tensor  # (n,) int64, ascending
    to_proxies: Tensor | None  # (n, P) float32, of samples to proxies; None if these classes have no proxies
    proxy_labels: Tensor | None  # (P,) int64, ascending


def plot_heatmap(embedded: EmbeddedSplit, output: Path, *, classes: int) -> HeatMaps:
    """Draw the similarities of samples to proxies, if there are any, and of some evenly spread classes."""
    shown = embedded.of_classes(classes)
    maps = heat_maps(shown)
    measure = embedded.manifold.similarity_name.replace("_", " ")
    class_names = shown.dataset.class_names
    names = shortened_apart([class_names[label] for label in maps.classes.tolist()], LONGEST_NAME)
    above = maps.to_proxies is not None
    with picture(output, (1 + above) * (COLUMN - 4)) as figure:  # one above the other, each with its own scale
        panels = figure.subplots(1 + above, 1, squeeze=False)[:, 0]
        title = f"{embedded.split} split, ordered by class"
        if above:
            assert maps.proxy_labels is not None
            places = class_places(maps.sample_labels), class_places(maps.proxy_labels)
            draw_map(figure, panels[0], maps.to_proxies, names, places, measure)
            panels[0].set(title=f"Samples to proxies, {title}", xlabel="proxy", ylabel="sample")
        places = list(range(len(names))), list(range(len(names)))
        draw_map(figure, panels[-1], maps.between, names, places, f"mean {measure}")
        panels[-1].set(title=f"Two samples by their classes, {title}", xlabel="class", ylabel="class")
    return maps


@torch.no_grad()
def heat_maps(embedded: EmbeddedSplit) -> HeatMaps:
    """Compute the values of both maps."""
    order = embedded.labels.argsort(stable=True)
    points, labels = embedded.points[order], embedded.labels[order]
    proxies = embedded.proxies()
    between = class_similarities(embedded.manifold, points, labels)
    if proxies is None:
        return HeatMaps(labels.unique(), between, labels, None, None)
    to_proxies = embedded.manifold.similarity(points, proxies.points)
    return HeatMaps(labels.unique(), between, labels, to_proxies, proxies.labels)


def class_similarities(manifold: Manifold, points: Tensor, labels: Tensor) -> Tensor:
    """Compute the mean similarity of two samples (N, D) by their labels, (c, c) float64; nan for a class of one."""
    present, codes, counts = labels.unique(return_inverse=True, return_counts=True)
    sums = torch.zeros(len(present), len(present), dtype=torch.float64)
    for code in range(len(present)):
        rows = (codes == code).nonzero()[:, 0]
        similarities = manifold.similarity(points[rows].double(), points.double())
        similarities[torch.arange(len(rows)), rows] = 0  # similarity of a sample to itself
        sums[code].index_add_(0, codes, similarities.sum(0))
    return sums / (counts[:, None] * counts - torch.diag(counts))


def draw_map(figure: Any, axes: Any, values: Any, names: list[str], places: Any, measure: str) -> None:
    """Draw a map (rows, columns) with names at their places, and its color scale."""
    image = axes.imshow(values.numpy(), cmap="viridis", aspect="auto")  # readable by the color-blind and in gray
    figure.colorbar(image, ax=axes, label=measure)
    named = len(names) <= MOST_NAMES
    axes.set_yticks(places[0] if named else [], names if named else [], fontsize=5)
    axes.set_xticks(places[1] if named else [], names if named else [], fontsize=5, rotation=90)


def class_places(labels: Tensor) -> list[float]:
    """Return the middle position of each class among ascending labels (n,).

    Example:
        >>> class_places(torch.tensor([3, 3, 3, 5]))
        [1.0, 3.0]
    """
    counts = labels.unique(return_counts=True)[1]
    return (counts.cumsum(0) - (counts + 1) / 2).tolist()


def plot_histogram(
    embedded: EmbeddedSplit, output: Path, *, bar: Bar = no_bar
) -> tuple[ScoreHistograms, ScoreHistograms]:
    """Draw histograms of the similarities of pairs by the backbone before training and by the trained model."""
    groups = embedded.dataset.groups_of(embedded.rows)
    after = counted(Points(embedded.points, embedded.labels, embedded.manifold, groups=groups), embedded.split)
    before = counted(pretrained_points(embedded, bar), embedded.split)
    weights = "pretrained" if embedded.trained.recipe.backbone.is_pretrained else "random"
    has_weights = not isinstance(embedded.trained.recipe.backbone, IdentityConfig)
    baseline = f"Backbone before training, {weights} weights" if has_weights else "Untransformed vectors"
    measure = embedded.manifold.similarity_name.replace("_", " ")
    with picture(output, 92) as figure:
        above, below = figure.subplots(2, 1, sharex=measure == "cosine")
        draw_histogram(above, before, f"{baseline}, {embedded.split} split", "cosine")
        draw_histogram(below, after, f"Trained model, {embedded.split} split", measure)
        figure.legend(*above.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    return before, after


def pretrained_points(embedded: EmbeddedSplit, bar: Bar = no_bar) -> Points:
    """Return the points of the split by the checkpoint ``pretrained``."""
    recipe, dataset, ranks = embedded.trained.recipe, embedded.dataset, embedded.ranks
    with files_of_run(embedded.run):
        before = pretrained_model(recipe, dataset.num_features, ranks)
    embeddings = split_embeddings(embedded.run, before, ranks, dataset, embedded.split, bar=bar)
    groups = dataset.groups_of(embeddings.indices)
    return Points(embeddings.points, embeddings.labels, before.manifold.cpu(), groups=groups)


def counted(points: Points, split: str) -> ScoreHistograms:
    """Count the pairs of a split by their similarity."""
    try:
        return score_histograms(points)
    except ValueError as error:
        raise UserError(f"the {split} split has {error}") from error


def draw_histogram(axes: Any, counts: ScoreHistograms, title: str, measure: str) -> None:
    """Draw the shares of both kinds of pairs: one filled with a solid line, the other hatched with a dashed line."""
    edges = counts.edges.numpy()
    looks: tuple[dict[str, Any], ...] = (
        {"facecolor": f"{COLORS[0]}70", "edgecolor": COLORS[0]},
        {"facecolor": "none", "edgecolor": COLORS[1], "hatch": "////", "linestyle": "--"},
    )
    kinds = (("pairs of the same class", counts.same), ("pairs of different classes", counts.different))
    for look, (name, bins) in zip(looks, kinds, strict=True):
        share = 100 * bins.double() / bins.sum()
        axes.stairs(share.numpy(), edges, fill=True, label=name, linewidth=0.9, **look)
    axes.set(title=title, xlabel=measure, ylabel="% of the pairs, per bin")
