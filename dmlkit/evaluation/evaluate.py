"""Evaluation of a model on a split: embed its images, search, and compute metrics."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dmlkit.datasets.files.dataset import Dataset
from dmlkit.distributed.launch import Ranks
from dmlkit.embedding.in_memory import Embeddings, embed_dataset
from dmlkit.embedding.progress_bar import EMBEDDING, Advance, Bar, no_bar
from dmlkit.embedding.trained import TrainedModel
from dmlkit.errors import UserError
from dmlkit.evaluation.result import Evaluation, Rescoring, searching
from dmlkit.loading.inputs import refuse_faults, refuse_nothing_read
from dmlkit.manifolds.base import Manifold
from dmlkit.metrics.base import MetricConfig, Points
from dmlkit.metrics.ranking.codec import Codec, Rescore
from dmlkit.metrics.ranking.labels import Labels
from dmlkit.metrics.ranking.local import LocalScores
from dmlkit.metrics.ranking.place import PlaceScores
from dmlkit.metrics.ranking.rankings import Ties
from dmlkit.metrics.ranking.rerank import Rerank
from dmlkit.metrics.scoring import Scores, score_retrieval
from dmlkit.model import EmbeddingModel
from dmlkit.recipe.schema import Recipe


@dataclass(frozen=True)
class SecondScoring:
    """Another way to score the same queries, whose metrics are reported next to the plain ones.

    Args:
        rerank: method by which the queries are ranked once more.
        points: other points of the same images, instead of their embeddings.
        local: returns local scores, or evidence of place and time, for the rows (N,) bool of the queries and of the
            gallery; replaces the other two.
    """

    rerank: Rerank | None = None
    points: Points | None = None
    local: Callable[[Tensor, Tensor], LocalScores | PlaceScores] | None = None


PLAIN = SecondScoring()  # no other way


def evaluate(
    fabric: Ranks,
    model: EmbeddingModel,
    dataset: Dataset,
    recipe: Recipe,
    *,
    split: str,
    bar: Bar = no_bar,
    ties: Ties = "expected",
) -> Evaluation:
    """Embed a split and score it with the recipe's metrics.

    Args:
        fabric: the device, and the ranks; each rank searches for its share of the queries.
        recipe: the recipe, whose transform and metrics are used.
        ties: how items with the same score are counted; see `dmlkit.metrics.retrieval_metrics`.

    Raises:
        UserError: an image cannot be read and the recipe has ``on_bad_image: error``, no image can be read, or there
            is nothing to retrieve.
    """
    workers = recipe.training.workers
    with bar(EMBEDDING, len(dataset)) as advance:
        found = embed_dataset(fabric, model, dataset, recipe.transform, workers=workers, advance=advance)
    trained = TrainedModel.of(recipe, model)
    return score_split(fabric, trained, found, dataset, split=split, bar=bar, ties=ties)


def score_split(
    fabric: Ranks,
    trained: TrainedModel,
    embeddings: Embeddings,
    dataset: Dataset,
    *,
    split: str,
    bar: Bar = no_bar,
    ties: Ties = "expected",
    second: SecondScoring = PLAIN,
) -> Evaluation:
    """Score the embeddings of a split by a model with the metrics of its recipe, see `evaluate` and `score_dataset`.

    Raises:
        UserError: see `evaluate`.
    """
    recipe = trained.recipe
    refuse_faults(embeddings.faults, recipe.dataset.on_bad_image)
    refuse_nothing_read(len(embeddings.labels), embeddings.faults, f"the {split} split")
    try:
        with bar("ranking", -(-len(embeddings.labels) // fabric.world_size)) as advance:
            return score_dataset(
                embeddings,
                dataset,
                trained.manifold,
                recipe.metrics,
                fabric=fabric,
                ties=ties,
                advance=advance,
                second=second,
            )
    except ValueError as error:
        raise UserError(f"cannot evaluate the {split} split: {error}") from error


def score_dataset(
    embeddings: Embeddings,
    dataset: Dataset,
    manifold: Manifold,
    metrics: Sequence[MetricConfig],
    *,
    fabric: Ranks | None = None,
    ties: Ties = "expected",
    advance: Advance = lambda _: None,
    second: SecondScoring = PLAIN,
) -> Evaluation:
    """Score embeddings of a dataset; if the dataset has queries and a gallery, the queries search the gallery.

    Images of a query's own group are not ranked and do not affect its metrics, as junk images in Market-1501.

    Args:
        embeddings: embeddings of the images of the dataset that could be read.
        dataset: the images, with their labels.
        manifold: geometry of the embeddings.
        metrics: metrics to compute.
        fabric: the device, and the ranks, which share the queries. Default: one process on the CPU.
        ties: how items with the same score are counted.
        advance: receives how many more queries are ranked.
        second: another way to score the queries as well. Default: none.

    Raises:
        ValueError: see `dmlkit.metrics.retrieval_metrics`.
    """
    device = fabric.device if fabric else None
    group = torch.distributed.group.WORLD if fabric and fabric.world_size > 1 else None
    labels, ids = embeddings.labels, embeddings.indices
    check_levels(metrics, dataset)
    query = found = torch.ones(len(labels), dtype=torch.bool)
    options: dict[str, Any] = {}
    if dataset.query is not None and dataset.gallery is not None:
        query, found = dataset.query[ids], dataset.gallery[ids]
    if query is not found or dataset.groups is not None:
        options["gallery_labels"] = at_levels(dataset, labels[found])
        own = ids if dataset.groups is None else dataset.groups[ids]
        options |= {"ids": own[query], "gallery_ids": own[found]}  # an image that is both never finds itself

    def score(given: Points, metrics: Sequence[MetricConfig], **more: Any) -> Scores:
        points = given.embeddings.to(device)
        gallery = points[found] if options else None
        more = {"group": group, **more, "manifold": given.manifold, "ties": ties}
        own = at_levels(dataset, labels[query])
        return score_retrieval(points[query], own, gallery, metrics=metrics, **options, **more)

    def score_form(codec: Codec) -> Scores:
        points, rescore = embeddings.points.cpu(), None
        if codec.stored.precision == "rescored":
            rescore = Rescore(codec.manifold, points[query], points[found])
        # by this rank alone, since only the first one reports
        decoded = Points(codec.decode(points), labels, codec.space)
        return score(decoded, searching(metrics), group=None, rescore=rescore)

    plain = Points(embeddings.points, labels, manifold)
    scores, alternative = score(plain, metrics, advance=advance), None
    if second.local is not None:
        alternative = score(plain, searching(metrics), rescore=second.local(query, found))
    elif second.rerank is not None or second.points is not None:
        alternative = score(second.points or plain, searching(metrics), rerank=second.rerank)
    own, nearest = labels[query][scores.queries], labels[found][scores.nearest]
    if dataset.members is not None:  # it is no mistake to find an image that shares a label
        nearest = own.where((dataset.members[own] & dataset.members[nearest]).any(1), nearest)
    return Evaluation(
        scores=scores,
        labels=own,
        nearest_labels=nearest,
        class_names=dataset.class_names,
        images=[dataset.key(index) for index in ids[query][scores.queries].tolist()],
        classes=len(labels[query].unique()),
        faults=embeddings.faults,
        alternative=alternative,
        rescoring=Rescoring(embeddings.points, manifold, score_form, lambda: embeddings.points),
    )


def at_levels(dataset: Dataset, labels: Tensor) -> Labels:
    """Return labels (n,) of a dataset at each level of its hierarchy, or as a matrix if images have several; as they
    are if there is neither."""
    if dataset.members is not None:
        return dataset.members[labels]
    return {name: of_class[labels] for name, of_class in dataset.levels.items()} or labels


def check_levels(metrics: Sequence[MetricConfig], dataset: Dataset) -> None:
    """Check that a dataset has the levels that metrics need.

    Raises:
        ValueError: it has not.
    """
    for metric in metrics:
        if metric.uses_levels and not dataset.levels:
            raise ValueError(
                f"{metric.names()[0]}: the dataset has no levels; set dataset.levels, or remove the metric"
            )
        if metric.level not in (None, *dataset.levels):
            expected = ", ".join(dataset.levels)
            raise ValueError(f"{metric.names()[0]}: unknown level {metric.level!r}; expected one of {expected}")
