"""Curvature and maps of a run or of embeddings, as ``dmlkit curvature`` and ``dmlkit plot`` compute them."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from dmlkit.datasets.base import Split
from dmlkit.distributed.launch import start_ranks
from dmlkit.embedding.fusion import ModelChoice
from dmlkit.embedding.points import all_points
from dmlkit.embedding.progress_bar import Bar, no_bar
from dmlkit.embedding.sources import open_points
from dmlkit.embedding.split import EmbeddedSplit
from dmlkit.embedding.trained import load_model
from dmlkit.files.source import check_options, kind_of
from dmlkit.geometry.curvature import Hyperbolicity, backbone_features, hyperbolicity
from dmlkit.geometry.planes import require_disk
from dmlkit.geometry.plot import SIDE, MapKind, Mapped, plot_embeddings
from dmlkit.manifolds.base import Manifold
from dmlkit.manifolds.euclidean import Euclidean
from dmlkit.run_folder.folder import RunFolder


def check_map(run: Path, kind: MapKind) -> None:
    """Check, before anything is embedded, that a map can be drawn of a run.

    Raises:
        UserError: the kind is ``disk``, and the run's embeddings do not lie in it; or there is no run.
    """
    recipe = RunFolder(run).recipe()
    if kind == "disk":
        require_disk(recipe.manifold.build(recipe.embedding_dim))


class Measured(NamedTuple):
    """Measured hyperbolicity of points."""

    hyperbolicity: Hyperbolicity
    points: int
    what: str
    """Description of the points and of the distance used."""


def measure_curvature(
    source: Path,
    *,
    split: Split | None = None,
    sample: int = 500,
    draws: int = 10,
    seed: int = 0,
    device: str | None = None,
    overrides: Sequence[str] = (),
    manifold: str | None = None,
) -> Measured:
    """Measure how tree-like embeddings, or the features of a run's images, are; see `hyperbolicity`.

    Args:
        source: see `open_points`.
        split: for a run, the split whose images are used; by default train.
        device: for a run, the device; see `start_ranks`.
        overrides: for a run, ``key=value`` each, of its dataset, which may have moved.
        manifold: geometry of an array, see `open_points`.

    Raises:
        UserError: an option does not apply to the source, or there are too few points.
    """
    space, points, what = _points_of(source, split, device, overrides, manifold)
    return Measured(hyperbolicity(space, points, sample=sample, draws=draws, seed=seed), len(points), what)


def _points_of(
    source: Path, split: Split | None, device: str | None, overrides: Sequence[str], manifold: str | None
) -> tuple[Manifold, Tensor, str]:
    if kind_of(source) != "run":
        model = ModelChoice(device=device)
        points = open_points(source, split=split, overrides=overrides, manifold=manifold, model=model)
        what = f"embeddings of {source}, by the distance of {type(points.manifold).__name__.lower()}"
        return points.manifold, all_points(points), what
    check_options(source, "run", {"--manifold": manifold})
    fabric, split = start_ranks(device or "auto"), split or "train"
    run = RunFolder(source)
    trained = load_model(run, fabric, overrides=overrides)
    features = backbone_features(run, trained, fabric, split)
    what = f"images of the {split} split, by the Euclidean distance of their features before the head"
    return Euclidean(features.shape[1]), features, what


class Drawn(NamedTuple):
    """Map that was written: its file, and the number of images and classes on it."""

    path: Path
    images: int
    classes: int


def plot_map(
    embedded: EmbeddedSplit,
    output: Path | None,
    *,
    kind: MapKind,
    classes: int = 20,
    images: bool = False,
    bar: Bar = no_bar,
) -> Drawn:
    """Draw a map of a run's embeddings, colored by class, with the proxies of training classes; see `plot_embeddings`.

    Args:
        output: the file; by default one in the run.
        kind: ``disk``, ``pca`` or ``tsne``.
        classes: number of classes to show, evenly spread.
        images: whether to draw the images themselves.

    Raises:
        UserError: the kind does not suit the manifold, or the images are requested and the samples are vectors.
    """
    output = output or embedded.run.plots / f"{embedded.split}-{kind}.png"
    if images:
        embedded.require_images(f"plot {kind} --images")
    shown = embedded.of_classes(classes)
    proxies = shown.proxies()
    mapped = Mapped(
        shown.points,
        shown.labels,
        shown.class_names,
        None if proxies is None else (proxies.points, proxies.labels),
        partial(shown.image, side=SIDE) if images else None,
    )
    plot_embeddings(shown.manifold, mapped, kind, output, f"{embedded.split} split", bar)
    return Drawn(output, len(shown.points), len(shown.labels.unique()))
