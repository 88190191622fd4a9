"""Look at the geometry of a run or of embeddings: what ``dmlkit curvature`` and ``dmlkit plot`` do."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from dmlkit.datasets.base import Split
from dmlkit.distributed.launch import start_fabric
from dmlkit.embedding.folder import EmbeddingFolder
from dmlkit.embedding.in_memory import EMBEDDING, Bar, embed_dataset, no_bar
from dmlkit.embedding.trained import load_model
from dmlkit.errors import UserError
from dmlkit.files.outputs import check_output, is_our_picture
from dmlkit.geometry.curvature import Hyperbolicity, backbone_features, hyperbolicity
from dmlkit.geometry.plot import Kind, default_kind, plot_embeddings
from dmlkit.loading.cache import images_of_split
from dmlkit.loading.faults import refuse_faults, refuse_nothing_read
from dmlkit.manifolds.base import Manifold
from dmlkit.manifolds.euclidean import Euclidean
from dmlkit.run_folder.folder import CheckpointName, RunFolder


class Measured(NamedTuple):
    """How tree-like some points are."""

    hyperbolicity: Hyperbolicity
    points: int
    what: str
    """The points in words, with their distance."""


def measure_curvature(
    source: Path,
    *,
    split: Split | None = None,
    sample: int = 500,
    draws: int = 10,
    seed: int = 0,
    device: str | None = None,
    overrides: Sequence[str] = (),
) -> Measured:
    """How tree-like the features of a run's images are, or embeddings; see `hyperbolicity`.

    Args:
        source: a run or a folder of embeddings.
        split: of a run, whose images; train by default.
        sample: points a draw.
        draws: how many.
        seed: decides the draws.
        device: of a run, where; see `start_fabric`.
        overrides: ``key=value`` each, of a run's dataset, which may have moved.

    Raises:
        UserError: an option that does not apply to embeddings, or too few points.
    """
    manifold, points, what = _points_of(source, split, device, overrides)
    return Measured(hyperbolicity(manifold, points, sample=sample, draws=draws, seed=seed), len(points), what)


def _points_of(
    source: Path, split: Split | None, device: str | None, overrides: Sequence[str]
) -> tuple[Manifold, Tensor, str]:
    if (source / "manifest.json").exists():
        for name, value in (("--split", split), ("--device", device), ("--set", overrides)):
            if value:
                raise UserError(f"curvature: {name} does not apply to a folder of embeddings; leave it out")
        folder = EmbeddingFolder(source)
        manifold = folder.manifold()
        points = torch.cat([torch.empty(0, manifold.point_dim), *folder.blocks()])
        return manifold, points, f"embeddings of {source}, by the distance of {folder.manifest.manifold.name}"
    fabric, split = start_fabric(device or "auto"), split or "train"
    trained = load_model(RunFolder(source), fabric, overrides=overrides)
    features = backbone_features(trained, fabric, images_of_split(trained.recipe.dataset, split))
    what = f"images of the {split} split, by the Euclidean distance of their features before the head"
    return Euclidean(features.shape[1]), features, what


class Drawn(NamedTuple):
    """A picture that was written."""

    path: Path
    images: int
    classes: int


def plot_run(
    path: Path,
    *,
    kind: Kind | None = None,
    split: Split = "test",
    classes: int = 20,
    output: Path | None = None,
    checkpoint: CheckpointName | None = None,
    device: str = "auto",
    overrides: Sequence[str] = (),
    bar: Bar = no_bar,
) -> Drawn:
    """Draw a run's embeddings, coloured by class; see `plot_embeddings`.

    Args:
        path: of the run.
        kind: ``disk``, ``pca`` or ``tsne``; by default the disk where the embeddings lie in it.
        split: whose images.
        classes: how many to show, evenly spread.
        output: a .png or .svg file; by default in the run.
        checkpoint: which weights; by default the best, else the last.
        device: where, see `start_fabric`.
        overrides: ``key=value`` each, of the run's dataset, which may have moved.
        bar: shows each step.

    Raises:
        UserError: another suffix, somebody else's file in that place, an image that cannot be read, or a kind that
            does not suit the manifold.
    """
    if output is not None:
        if output.suffix.lower() not in (".png", ".svg"):
            raise UserError(f"{output}: expected a file name that ends in .png or .svg")
        check_output(output, is_our_picture)
    fabric, run = start_fabric(device), RunFolder(path)
    trained = load_model(run, fabric, checkpoint, overrides=overrides)
    manifold = trained.model.manifold.cpu()
    kind = kind or default_kind(manifold)
    output = output or run.plots / f"{split}-{kind}.png"
    dataset = images_of_split(trained.recipe.dataset, split)
    with bar(EMBEDDING, len(dataset)) as advance:
        model = trained.model.to(fabric.device)
        embeddings = embed_dataset(fabric, model, dataset, trained.recipe.transform, advance=advance)
    refuse_faults(embeddings.faults, trained.recipe.dataset.on_bad_image)
    refuse_nothing_read(len(embeddings.labels), embeddings.faults, f"the {split} split")
    present = embeddings.labels.unique()
    chosen = present[torch.linspace(0, len(present) - 1, min(classes, len(present))).round().long()]
    shown = torch.isin(embeddings.labels, chosen)
    points, labels = embeddings.points[shown], embeddings.labels[shown]
    plot_embeddings(manifold.cpu(), points, labels, dataset.class_names, kind, output, bar)
    return Drawn(output, len(points), len(chosen))
