"""Histograms of the similarities of pairs of the same class and of different classes, before and after training."""

from pathlib import Path
from typing import Any

import torch

from dmlkit.backbones.identity import IdentityConfig
from dmlkit.embedding.progress_bar import Bar, no_bar
from dmlkit.embedding.split import EmbeddedSplit
from dmlkit.embedding.stored import split_embeddings
from dmlkit.embedding.trained import TrainedModel
from dmlkit.errors import UserError
from dmlkit.evaluation.mistakes import ScoreHistograms, score_histograms
from dmlkit.evaluation.untouched import has_pretrained_weights, untouched_model
from dmlkit.files.pictures import COLORS, picture
from dmlkit.manifolds.sphere import Sphere
from dmlkit.metrics.base import Points
from dmlkit.model import build_model


def plot_histogram(
    embedded: EmbeddedSplit, output: Path | None, *, bar: Bar = no_bar
) -> tuple[Path, ScoreHistograms, ScoreHistograms]:
    """Draw histograms of the similarities of pairs by the untouched backbone and by the trained model.

    Args:
        output: the file; by default one in the run.

    Returns:
        The file, and the counts before and after training.

    Raises:
        UserError: there are no pairs of both kinds, or the initial weights of the training are missing.
    """
    output = output or embedded.run.plots / f"{embedded.split}-histogram.png"
    after = counted(Points(embedded.points, embedded.labels, embedded.manifold), embedded.split)
    before = counted(untouched_points(embedded, bar), embedded.split)
    weights = "pretrained" if has_pretrained_weights(embedded.trained.recipe) else "random"
    has_weights = not isinstance(embedded.trained.recipe.backbone, IdentityConfig)
    baseline = f"Untouched backbone, {weights} weights" if has_weights else "Untransformed vectors"
    measure = embedded.manifold.similarity_name.replace("_", " ")
    with picture(output, 92) as figure:
        above, below = figure.subplots(2, 1, sharex=measure == "cosine")
        draw_histogram(above, before, f"{baseline}, {embedded.split} split", "cosine")
        draw_histogram(below, after, f"Trained model, {embedded.split} split", measure)
        figure.legend(*above.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    return output, before, after


def untouched_points(embedded: EmbeddedSplit, bar: Bar = no_bar) -> Points:
    """Compute the features of all images of the split by the backbone before training, see `untouched_model`."""
    recipe, dataset = embedded.trained.recipe, embedded.dataset
    with recipe.errors_at("backbone"), torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)  # as in training
        model = untouched_model(build_model(recipe, dataset.num_features)).to(embedded.fabric.device)
    recipe = recipe.model_copy(update={"manifold": Sphere.Config()})
    before = TrainedModel.of(recipe, model.eval(), embedded.trained.checkpoint)
    found = split_embeddings(embedded.run, before, embedded.fabric, dataset, embedded.split, of="untouched", bar=bar)
    return Points(found.points, found.labels, model.manifold.cpu())


def counted(points: Points, split: str) -> ScoreHistograms:
    """Count the pairs of a split by their similarity.

    Raises:
        UserError: there are no pairs of the same class, or none of different classes.
    """
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
