"""A split of a run's dataset, embedded by its model, for `dmlkit plot`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from dmlkit.datasets.base import Split
from dmlkit.datasets.files.dataset import Dataset, evenly_spread
from dmlkit.distributed.launch import Ranks, start_ranks
from dmlkit.errors import UserError
from dmlkit.files.image_file import BadImageError
from dmlkit.gallery.sources import split_points
from dmlkit.loading.inputs import refuse_faults
from dmlkit.manifolds.base import Manifold
from dmlkit.run_folder.folder import CheckpointName, RunFolder
from dmlkit.vectors.progress_bar import Bar, no_bar
from dmlkit.vectors.trained import TrainedModel, load_model


class ClassProxies(NamedTuple):
    """Proxies as points of the embeddings' manifold."""

    points: Tensor  # (P, D) float32
    labels: Tensor  # (P,) int64, training class of each proxy, ascending


@torch.no_grad()
def proxies_of(run: RunFolder, checkpoint: CheckpointName, manifold: Manifold) -> ClassProxies | None:
    """Return the proxies of a run's loss; None if it has none, or if they are not points of the embeddings' space.

    The manifold is that of the embeddings, with the curvature of the checkpoint.
    """
    if checkpoint == "pretrained":
        return None
    objective = run.load_checkpoint(checkpoint)["objective"]
    proxies = [tensor for name, tensor in objective.items() if name.startswith("loss.") and name.endswith(".proxies")]
    return class_proxies(proxies[0], manifold, len(run.training_classes())) if len(proxies) == 1 else None


def class_proxies(proxies: Tensor, manifold: Manifold, classes: int) -> ClassProxies | None:
    """Return learned proxies (C, d) or (C, K, d) as points; None if they do not fit the space or the classes."""
    width = manifold.dim if manifold.proxies == "features" else manifold.point_dim
    if proxies.ndim not in (2, 3) or proxies.shape[-1] != width or len(proxies) != classes:
        return None
    points = manifold.proxy_points(proxies.flatten(0, -2).float())
    labels = torch.arange(len(proxies)).repeat_interleave(len(points) // len(proxies))
    return ClassProxies(points, labels)


@dataclass(frozen=True)
class EmbeddedSplit:
    """Images of a split, their points and labels."""

    ranks: Ranks
    run: RunFolder
    trained: TrainedModel
    dataset: Dataset  # all images of the split, in its own order
    split: Split
    points: Tensor  # (N, D) float32 on the CPU
    labels: Tensor  # (N,) int64, into the dataset's class names
    rows: Tensor  # (N,) int64, into the dataset
    manifold: Manifold  # the geometry of the points, on the CPU

    def of_classes(self, count: int) -> "EmbeddedSplit":
        """Return the images of some classes, evenly spread over those of the split."""
        mask = torch.isin(self.labels, evenly_spread(self.labels.unique(), count))
        return replace(self, points=self.points[mask], labels=self.labels[mask], rows=self.rows[mask])

    def proxies(self) -> ClassProxies | None:
        """Return the proxies of the classes shown; only training classes may have some."""
        if self.split != "train" or self.run.training_classes() != self.dataset.class_names:
            return None
        proxies = proxies_of(self.run, self.trained.checkpoint, self.manifold)
        if proxies is None:
            return None
        mask = torch.isin(proxies.labels, self.labels)
        return proxies._replace(points=proxies.points[mask], labels=proxies.labels[mask])

    def image(self, index: int, side: int) -> Any:
        """Return the pixels (H, W, 3) of an image, ``side`` at most; None if it can no longer be read."""
        try:
            pixels = self.dataset.sample(int(self.rows[index]))
        except BadImageError:
            return None
        small = Image.fromarray(pixels.permute(1, 2, 0).numpy())
        small.thumbnail((side, side))
        return np.asarray(small)

    def require_images(self, what: str) -> None:
        """Raise a `UserError` for samples without pixels to show."""
        if not self.dataset.kind.has_pixels:
            kind = self.dataset.kind.name
            raise UserError(
                f"{what} shows images, but {self.run.path} embeds {kind}s; use another kind of plot, or no --thumbnails"
            )


def embed_split(
    path: Path,
    split: Split,
    *,
    checkpoint: CheckpointName | None = None,
    device: str = "auto",
    overrides: Sequence[str] = (),
    with_gallery: bool = False,
    bar: Bar = no_bar,
) -> EmbeddedSplit:
    """Return a split of a run's dataset with its embeddings, see `split_embeddings`.

    Args:
        overrides: changes of the run's dataset, which may have moved, each ``key=value``.
        with_gallery: whether test images of known classes come with their gallery, see `DatasetConfig.searched`.
    """
    ranks, run = start_ranks(device), RunFolder(path)
    trained = load_model(run, ranks, checkpoint, overrides=overrides)
    trained.recipe.dataset.require_one_label(str(path))
    embedded = split_points(run, trained, ranks, split, bar, with_gallery=with_gallery)
    refuse_faults(embedded.skipped, trained.recipe.dataset.on_bad_image)
    assert embedded.images is not None
    _, dataset, rows, _ = embedded.images
    return EmbeddedSplit(
        ranks, run, trained, dataset, split, embedded.points, dataset.labels[rows], rows, embedded.manifold
    )
