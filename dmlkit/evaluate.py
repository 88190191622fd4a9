"""Evaluate: how well a run's model retrieves images of classes it has not seen."""

from collections.abc import Sequence
from typing import Any

from lightning_fabric import Fabric

from dmlkit.datasets.base import Dataset
from dmlkit.embed import Advance, Embeddings, embed_dataset
from dmlkit.errors import UserError
from dmlkit.loading import refuse_faults
from dmlkit.metrics import retrieval_metrics
from dmlkit.metrics.base import MetricConfig
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
        ``{"metrics": {"recall@1": 0.93, ...}, "split": ..., "queries": ..., "classes": ..., "skipped": [...]}``;
        fractions, and one message per image that could not be read.

    Raises:
        UserError: an image cannot be read (with ``on_bad_image: error``), or there is nothing to retrieve.
    """
    embeddings = embed_dataset(
        fabric, model, dataset, recipe.transform, workers=recipe.training.workers, advance=advance
    )
    refuse_faults(embeddings.faults, recipe.dataset.on_bad_image)
    return report(embeddings, model, recipe.metrics, split=split)


def report(
    embeddings: Embeddings, model: EmbeddingModel, metrics: Sequence[MetricConfig], *, split: str
) -> dict[str, Any]:
    """Score embeddings; see `evaluate`."""
    device = model.normalization.shift.device
    try:
        values = retrieval_metrics(
            embeddings.points.to(device), embeddings.labels.to(device), manifold=model.manifold, metrics=metrics
        )
    except ValueError as error:
        raise UserError(f"cannot evaluate the {split} split: {error}") from error
    counts = embeddings.labels.unique(return_counts=True)[1]
    return {
        "metrics": values,
        "split": split,
        "queries": int(counts[counts > 1].sum()),
        "classes": len(counts),
        "skipped": embeddings.faults,
    }
