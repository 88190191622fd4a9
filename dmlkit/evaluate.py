"""Evaluate: how well a run's model retrieves images of classes it has not seen."""

from collections.abc import Sequence
from typing import Any

import torch
from lightning_fabric import Fabric

from dmlkit.datasets.base import Dataset
from dmlkit.embed import Advance, Embeddings, embed_dataset
from dmlkit.errors import UserError
from dmlkit.loading import refuse_faults
from dmlkit.metrics.base import MetricConfig
from dmlkit.metrics.retrieval import score_retrieval
from dmlkit.model import EmbeddingModel
from dmlkit.recipe import Recipe


def evaluate(
    fabric: Fabric,
    model: EmbeddingModel,
    dataset: Dataset,
    recipe: Recipe,
    *,
    split: str,
    advance: Advance | None = None,
) -> dict[str, Any]:
    """Embed a split and score it with the recipe's metrics.

    Args:
        fabric: the device, and the ranks.
        model: on that device.
        dataset: the images of the split.
        recipe: for its transform and metrics.
        split: the name of the split, for the report.
        advance: told of every batch.

    Returns:
        ``{"metrics": {"recall@1": 0.93, ...}, "split": ..., "queries": ..., "classes": ..., "notes": [...],
        "skipped": [...]}``; fractions, what a reader of them must know, one message per image that could not be read.

    Raises:
        UserError: an image cannot be read (with ``on_bad_image: error``), or there is nothing to retrieve.
    """
    embeddings = embed_dataset(
        fabric, model, dataset, recipe.transform, workers=recipe.training.workers, advance=advance
    )
    refuse_faults(embeddings.faults, recipe.dataset.on_bad_image)
    return report(embeddings, dataset, model, recipe.metrics, split=split)


def report(
    embeddings: Embeddings, dataset: Dataset, model: EmbeddingModel, metrics: Sequence[MetricConfig], *, split: str
) -> dict[str, Any]:
    """Score embeddings; see `evaluate`. Where the dataset names queries and a gallery, they are searched apart."""
    points, labels, ids = embeddings.points.to(model.normalization.shift.device), embeddings.labels, embeddings.indices
    query = torch.ones(len(labels), dtype=torch.bool)
    gallery: dict[str, Any] = {}
    if dataset.query is not None and dataset.gallery is not None:
        query, found = dataset.query[ids], dataset.gallery[ids]
        gallery = {"gallery": points[found], "gallery_labels": labels[found]}
        gallery |= {"ids": ids[query], "gallery_ids": ids[found]}  # an image that is both never finds itself
    try:
        scores = score_retrieval(points[query], labels[query], manifold=model.manifold, metrics=metrics, **gallery)
    except ValueError as error:
        raise UserError(f"cannot evaluate the {split} split: {error}") from error
    return {
        "metrics": scores.values,
        "split": split,
        "queries": len(scores.queries),
        "classes": len(labels[query].unique()),
        "notes": list(scores.notes),
        "skipped": embeddings.faults,
    }
