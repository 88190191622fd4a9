"""Embedding of images in memory; `dmlkit.embedding.run` writes files."""

from typing import NamedTuple

import torch
from lightning_fabric import Fabric
from torch import Tensor

from dmlkit.datasets.files.dataset import Dataset
from dmlkit.distributed.gather import gather_lists, gather_rows
from dmlkit.embedding.progress_bar import EMBEDDING, Advance, Bar, no_bar
from dmlkit.embedding.trained import TrainedModel
from dmlkit.loading.batches import evaluation_loader
from dmlkit.loading.faults import refuse_nothing_read
from dmlkit.manifolds.numerics.check_points import check_points
from dmlkit.model import EmbeddingModel
from dmlkit.transforms.base import TransformConfig

BATCH = 128  # images; for so few the start of loader processes takes longer than the images
UNSOUND = "the training diverged, or the model does not fit such inputs; use another --checkpoint or run"
"""Advice if a model's output is not a point of its manifold."""


class Embeddings(NamedTuple):
    """Points of the images that could be read."""

    points: Tensor  # (N, D) float32 on the CPU
    labels: Tensor  # (N,) int64
    indices: Tensor  # (N,) int64, into the dataset
    faults: list[str]  # one message per image that could not be read


@torch.inference_mode()
def embed_dataset(
    fabric: Fabric,
    model: EmbeddingModel,
    dataset: Dataset,
    transform: TransformConfig | None,
    *,
    workers: int | None = None,
    advance: Advance | None = None,
) -> Embeddings:
    """Embed all images in float32, a share on each rank; every rank gets all points in the order of the dataset.

    A share is whole batches, and the batches are those of `PartFolder`: with any number of ranks, and in a folder that
    ``dmlkit embed`` wrote, every embedding is the same to the bit.

    Args:
        fabric: the device, and the ranks.
        model: model on the device; its mode is restored afterwards.
        dataset: the samples.
        transform: transform, applied as in evaluation; None for vectors.
        workers: number of processes that read images, see `dmlkit.loading.batches.make_loader`.
        advance: called with the number of images of every batch.

    Raises:
        UserError: an embedding has nan or inf, or is off the manifold.
    """
    model.check_takes(dataset)
    was_training = model.training
    model.eval()
    share = BATCH * -(-len(dataset) // (BATCH * fabric.world_size))
    start = min(fabric.global_rank * share, len(dataset))
    loader = evaluation_loader(
        dataset,
        transform,
        indices=range(start, min(start + share, len(dataset))),
        batch_size=BATCH,
        workers=workers,
        pin_memory=fabric.device.type == "cuda",
    )
    points = torch.zeros(share, model.manifold.point_dim)
    indices = torch.full((share,), -1)
    faults: list[str] = []
    filled = 0
    for batch in loader:
        faults += batch.faults
        if len(batch.labels):
            into = slice(filled, filled + len(batch.labels))
            points[into] = model(batch.inputs.to(fabric.device)).float().cpu()
            indices[into] = batch.indices
            filled = into.stop
        if advance:
            advance((len(batch.labels) + len(batch.faults)) * fabric.world_size)
    model.train(was_training)
    if fabric.world_size > 1:
        points, indices, faults = _gather(fabric, points, indices, faults)
    kept = indices >= 0
    points, indices = points[kept], indices[kept]
    check_points(model.manifold, points, lambda row: str(dataset.paths[int(indices[row])]), UNSOUND)
    return Embeddings(points, dataset.labels[indices], indices, faults)


def _gather(fabric: Fabric, points: Tensor, indices: Tensor, faults: list[str]) -> tuple[Tensor, Tensor, list[str]]:
    points, indices = (gather_rows(fabric, own.to(fabric.device)).cpu() for own in (points, indices))
    return points, indices, gather_lists(fabric, faults)


def embed_images(trained: TrainedModel, fabric: Fabric, dataset: Dataset, source: str, bar: Bar = no_bar) -> Embeddings:
    """Embed the images of a dataset; those that cannot be read are reported in the result.

    Raises:
        UserError: no image could be read, or see `embed_dataset`.
    """
    workers, transform = 0 if len(dataset) <= BATCH else trained.recipe.training.workers, trained.recipe.transform
    with bar(EMBEDDING, len(dataset)) as advance:
        found = embed_dataset(fabric, trained.model, dataset, transform, workers=workers, advance=advance)
    refuse_nothing_read(len(found.points), found.faults, source)
    return found
