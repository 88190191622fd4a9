"""Embedding of images in memory; `dmlkit.vectors.run` writes files."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dmlkit.datasets.files.dataset import Dataset
from dmlkit.distributed.exchange import gather_lists, gather_rows
from dmlkit.distributed.launch import Ranks
from dmlkit.loading.batches import evaluation_loader
from dmlkit.loading.inputs import refuse_nothing_read
from dmlkit.manifolds.base import check_points
from dmlkit.model import EmbeddingModel
from dmlkit.transforms.base import TransformConfig
from dmlkit.vectors.fusion import join
from dmlkit.vectors.progress_bar import EMBEDDING, Advance, Bar, no_bar
from dmlkit.vectors.store import BATCH_IMAGES
from dmlkit.vectors.trained import TrainedModel

UNSOUND = "the training diverged, or the model does not fit such inputs; use another --checkpoint or run"
"""Advice if a model's output is not a point of its manifold."""


class Embeddings(NamedTuple):
    """Points of the images that could be read."""

    points: Tensor  # (N, D) float32 on the CPU
    labels: Tensor  # (N,) int64
    indices: Tensor  # (N,) int64, into the dataset
    faults: list[str]  # one message per image that could not be read
    local: Tensor | None = None  # (N, P, C) float16, local features, if they were computed with the points


@torch.inference_mode()
def embed_dataset(
    ranks: Ranks,
    model: EmbeddingModel,
    dataset: Dataset,
    transform: TransformConfig | None,
    *,
    indices: Sequence[int] | None = None,
    workers: int | None = None,
    advance: Advance = lambda _: None,
) -> Embeddings:
    """Embed all images in float32, a share on each rank; every rank gets all points in the order of the dataset.

    A share is whole batches, and the batches are those of `FillJob`: with any number of ranks, and in a store, every
    embedding is the same to the bit.

    Args:
        model: model on the device; its mode is restored afterwards.
        transform: transform, applied as in evaluation; None for vectors.
        advance: called with the number of images of every batch.
    """
    model.check_takes(dataset)
    was_training = model.training
    if was_training:  # the modes of Lite0's 279 modules take 3 ms to set and restore, a photo 25
        model.eval()
    wanted = range(len(dataset)) if indices is None else indices
    share = BATCH_IMAGES * -(-len(wanted) // (BATCH_IMAGES * ranks.world_size))
    start = min(ranks.global_rank * share, len(wanted))
    loader = evaluation_loader(
        dataset,
        transform,
        indices=wanted[start : start + share],
        batch_size=BATCH_IMAGES,
        workers=workers,
        pin_memory=ranks.device.type == "cuda",
    )
    points = torch.zeros(share, model.manifold.point_dim)
    rows = torch.full((share,), -1)
    faults: list[str] = []
    filled = 0
    for batch in loader:
        faults += batch.faults
        if len(batch.labels):
            into = slice(filled, filled + len(batch.labels))
            points[into] = model(batch.inputs.to(ranks.device)).float().cpu()
            rows[into] = batch.indices
            filled = into.stop
        advance((len(batch.labels) + len(batch.faults)) * ranks.world_size)
    if was_training:
        model.train()
    if ranks.world_size > 1:
        points, rows = (gather_rows(ranks, own.to(ranks.device)).cpu() for own in (points, rows))
        faults = gather_lists(ranks, faults)
    kept = rows >= 0
    points, rows = points[kept], rows[kept]
    check_points(model.manifold, points, lambda row: str(dataset.paths[int(rows[row])]), UNSOUND)
    return Embeddings(points, dataset.labels[rows], rows, faults)


def embed_images(
    trained: TrainedModel,
    ranks: Ranks,
    dataset: Dataset,
    source: str,
    bar: Bar = no_bar,
    known: Embeddings | None = None,
) -> Embeddings:
    """Embed the images of a dataset that are not known; those that cannot be read are reported in the result."""
    if trained.fusion is not None and known is None:
        return fused(trained, [embed_images(one, ranks, dataset, source, bar) for one in trained.members])
    dataset.limit(trained.recipe.dataset.max_pixels)
    missing: Sequence[int] = range(len(dataset))
    if known is not None:
        missing = sorted({*missing}.difference(known.indices.tolist()))
        if not missing:
            return known
    with bar(EMBEDDING, len(missing)) as advance:
        found = embed_dataset(
            ranks,
            trained.model_of_few if len(missing) <= BATCH_IMAGES else trained.model,
            dataset,
            trained.recipe.transform,
            indices=missing,
            workers=0 if len(missing) <= BATCH_IMAGES else trained.recipe.training.workers,
            advance=advance,
        )
    if known is not None:
        rows = torch.cat([known.indices, found.indices])
        order, points = rows.argsort(), torch.cat([known.points, found.points])
        found = Embeddings(points[order], dataset.labels[rows[order]], rows[order], found.faults)
    refuse_nothing_read(len(found.points), found.faults, source)
    return found


def fused(trained: TrainedModel, found: Sequence[Embeddings]) -> Embeddings:
    """Join the embeddings of the two models of a fusion; images that only one of them could read are left out."""
    assert trained.fusion is not None
    first, second = found
    rows = [torch.isin(one.indices, other.indices) for one, other in ((first, second), (second, first))]
    points = [one.points[kept].to(trained.device) for one, kept in zip(found, rows, strict=True)]
    joined = join([one.manifold for one in trained.members], points, trained.fusion.share).cpu()
    faults = list(dict.fromkeys(first.faults + second.faults))
    return Embeddings(joined, first.labels[rows[0]], first.indices[rows[0]], faults)
