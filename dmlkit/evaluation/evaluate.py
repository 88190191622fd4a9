"""Evaluation of a model on a split: embed its images, search, compute metrics; and its result, also per class."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, Field
from torch import Tensor

from dmlkit.datasets.files.dataset import Dataset
from dmlkit.distributed.launch import Ranks
from dmlkit.errors import UserError
from dmlkit.files.outputs import write_table
from dmlkit.loading.batches import Loader
from dmlkit.loading.inputs import refuse_faults, refuse_nothing_read
from dmlkit.manifolds.base import Manifold
from dmlkit.metrics.base import Labeled, Labels, MetricConfig, Points
from dmlkit.metrics.ranking.codec import Codec, by_full_points
from dmlkit.metrics.ranking.rerank import Rerank
from dmlkit.metrics.scoring import Scores, metric_configs, score_retrieval
from dmlkit.model import EmbeddingModel
from dmlkit.nearest.rescore import Rescorer
from dmlkit.recipe.schema import Recipe
from dmlkit.vectors.in_memory import Embeddings, embed_share, share_loader
from dmlkit.vectors.progress_bar import EMBEDDING, Advance, Bar, no_bar
from dmlkit.vectors.trained import TrainedModel

CLASS = "class"  # name of the array of classes among those of metrics: no metric has that name


class ClassFigures(BaseModel, frozen=True, extra="forbid"):
    """Number of queries of one class, and the mean of each metric over them."""

    name: str = Field(alias="class")
    queries: int
    metrics: dict[str, float]


class ConfusedClasses(BaseModel, frozen=True, extra="forbid"):
    """Queries of one class whose nearest neighbor is of another class."""

    name: str = Field(alias="class")
    taken_for: str
    queries: int
    share: float  # share of the queries of the class


def searching(metrics: Sequence[MetricConfig | str]) -> list[MetricConfig]:
    """Return the metrics that rank a gallery."""
    ranking = [config for config in metric_configs(metrics) if config.searches]
    if not ranking:
        raise ValueError("none of the metrics ranks a gallery; add one with --metric, e.g. map@r")
    return ranking


@dataclass(frozen=True)
class Rescoring:
    """All that it takes to score the queries again with another stored form of the embeddings."""

    points: Tensor  # (N, D) embeddings of queries and gallery
    manifold: Manifold
    score: Callable[[Codec], Scores]  # scores decoded points in the place of ``points``
    ranges: Callable[[], Tensor]  # returns the points that give the ranges of int8
    ranges_of: str = "the evaluated embeddings themselves"


@dataclass(frozen=True)
class Evaluation:
    """Scores with the labels and names of the queries."""

    scores: Scores  # of Q queries
    labels: Tensor  # (Q,) int64, indices of ``class_names``
    nearest_labels: Tensor  # (Q,) int64, labels of their nearest neighbors; their own if they share one of several
    class_names: Sequence[str]  # C names
    images: Sequence[str]  # Q unique names of the queries
    classes: int  # number of classes, including those of queries without a positive
    faults: list[str]  # one message per image that could not be read
    alternative: Scores | None  # of the same queries, re-ranked or with mirror images
    rescoring: Rescoring

    def class_figures(self) -> list[ClassFigures]:
        """Compute the mean of each metric per class that has queries, in the order of labels."""
        classes, index, counts = self.labels.unique(return_inverse=True, return_counts=True)
        empty, per_query = torch.zeros(len(classes), dtype=torch.float64), self.scores.per_query
        means: list[list[float]] = [
            (empty.index_add(0, index, value.double()) / counts).tolist() for value in per_query.values()
        ]
        rows: list[dict[str, Any]] = [
            {"class": self.class_names[label], "queries": count, "metrics": dict(zip(per_query, values, strict=True))}
            for label, count, *values in zip(classes.tolist(), counts.tolist(), *means, strict=True)
        ]
        return [ClassFigures.model_validate(row) for row in rows]

    def worst_classes(self) -> list[ClassFigures]:
        """Compute the metrics of every class, the worst by the last metric first."""
        last = list(self.scores.per_query)[-1]
        return sorted(self.class_figures(), key=lambda figures: figures.metrics[last])

    def confusions(self) -> list[ConfusedClasses]:
        """Count for each pair of classes how many queries of one have their nearest neighbor in the other, most first.

        There are none without a metric that has values per query.
        """
        if not self.scores.per_query:
            return []
        labels, names = self.labels, self.class_names
        wrong = labels != self.nearest_labels
        pairs, counts = torch.stack([labels[wrong], self.nearest_labels[wrong]]).unique(dim=1, return_counts=True)
        sizes = labels.bincount().tolist()
        confused = [
            ConfusedClasses.model_validate(
                {"class": names[label], "taken_for": names[other], "queries": count, "share": count / sizes[label]}
            )
            for (label, other), count in zip(pairs.T.tolist(), counts.tolist(), strict=True)
        ]
        return sorted(confused, key=lambda pair: (-pair.queries, -pair.share))  # equal ones in the order of labels

    def fingerprint(self) -> str:
        """Return a hash of the queries: two models can be compared per query if their hashes are equal."""
        labels = [self.class_names[label] for label in self.labels.tolist()]
        lines = (f"{image}\0{label}\n" for image, label in zip(self.images, labels, strict=True))
        return sha256("".join(lines).encode()).hexdigest()

    def save_classes(self, path: Path) -> None:
        """Write a CSV table of every class, worst first."""
        if not self.scores.per_query:
            raise UserError("--output: none of the metrics has a value per query; add one with --metric, e.g. recall@1")
        rows = ((figures.name, figures.queries, *figures.metrics.values()) for figures in self.worst_classes())
        write_table(path, ["class", "queries", *self.scores.per_query], rows)


@dataclass(frozen=True)
class SecondScoring:
    """Another way to score the same queries, whose metrics are reported next to the plain ones."""

    rerank: Rerank | Rescorer | None = None  # method by which the queries are ranked once more, or second similarity
    points: Points | None = None  # other points of the same images, instead of their embeddings


PLAIN = SecondScoring()  # no other way


def evaluate(
    ranks: Ranks,
    model: EmbeddingModel,
    dataset: Dataset,
    recipe: Recipe,
    *,
    split: str,
    loader: Loader | None = None,
    bar: Bar = no_bar,
) -> Evaluation:
    """Embed a split and score it with the recipe's metrics. ``loader``: its `share_loader`, to use readers again."""
    if loader is None:
        loader = share_loader(ranks, dataset, recipe.transform, range(len(dataset)), recipe.training.workers)
    with bar(EMBEDDING, len(dataset)) as advance:
        embeddings = embed_share(ranks, model, dataset, loader, len(dataset), advance)
    trained = TrainedModel.of(recipe, model)
    return score_split(ranks, trained, embeddings, dataset, split=split, bar=bar)


def score_split(
    ranks: Ranks,
    trained: TrainedModel,
    embeddings: Embeddings,
    dataset: Dataset,
    *,
    split: str,
    bar: Bar = no_bar,
    second: SecondScoring = PLAIN,
) -> Evaluation:
    """Score the embeddings of a split by a model with the metrics of its recipe, see `evaluate` and `score_dataset`."""
    recipe = trained.recipe
    refuse_faults(embeddings.faults, recipe.dataset.on_bad_image)
    refuse_nothing_read(len(embeddings.labels), embeddings.faults, f"the {split} split")
    try:
        times = 1 if second == PLAIN else 2
        with bar("ranking", times * -(-len(embeddings.labels) // ranks.world_size)) as advance:
            return score_dataset(
                embeddings, dataset, trained.manifold, recipe.metrics, ranks=ranks, advance=advance, second=second
            )
    except ValueError as error:
        raise UserError(f"cannot evaluate the {split} split: {error}") from error


def score_dataset(
    embeddings: Embeddings,
    dataset: Dataset,
    manifold: Manifold,
    metrics: Sequence[MetricConfig],
    *,
    ranks: Ranks | None = None,
    advance: Advance = lambda _: None,
    second: SecondScoring = PLAIN,
) -> Evaluation:
    """Score embeddings of a dataset; if the dataset has queries and a gallery, the queries search the gallery.

    Images of a query's own group are not ranked and do not affect its metrics, as junk images in Market-1501. The ranks
    share the queries; without them it is one process on the CPU.
    """
    device = ranks.device if ranks else None
    group = torch.distributed.group.WORLD if ranks and ranks.world_size > 1 else None
    labels, ids = embeddings.labels, embeddings.indices
    check_levels(metrics, dataset)
    query = searched = torch.ones(len(labels), dtype=torch.bool)
    if dataset.query is not None and dataset.gallery is not None:
        query, searched = dataset.query[ids], dataset.gallery[ids]
    has_gallery = query is not searched or dataset.groups is not None
    own_ids = dataset.groups_of(ids)  # an image on both sides never finds itself

    def side(points: Tensor, rows: Tensor) -> Labeled:
        row_labels: Labels = {name: of_class[labels[rows]] for name, of_class in dataset.levels.items()} or labels[rows]
        row_labels = row_labels if dataset.members is None else dataset.members[labels[rows]]
        return Labeled(points[rows], row_labels, own_ids[rows] if has_gallery else None)

    def score(labeled_points: Points, metrics: Sequence[MetricConfig], **options: Any) -> Scores:
        points = labeled_points.embeddings.to(device)
        gallery = side(points, searched) if has_gallery else None
        options = {"group": group, **options}
        return score_retrieval(side(points, query), gallery, labeled_points.manifold, metrics, **options)

    def score_form(codec: Codec) -> Scores:
        points, rescore = embeddings.points.cpu(), None
        if codec.stored.precision == "rescored":
            rescore = by_full_points(codec.manifold, points[query], points[searched])
        # by this rank alone, since only the first one reports
        decoded = Points(codec.decode(points), labels, codec.space)
        return score(decoded, searching(metrics), group=None, rerank=rescore)

    plain = Points(embeddings.points, labels, manifold)
    scores, alternative = score(plain, metrics, advance=advance), None
    if dataset.groups is not None and dataset.members is None:
        scores = replace(scores, notes=(*scores.notes, *_junk_notes(scores, labels, query, searched)))
    if second != PLAIN:
        rerank = second.rerank
        if isinstance(rerank, Rescorer):
            rerank = rerank.between(*(mask.nonzero()[:, 0] for mask in (query, searched)))
        alternative = score(second.points or plain, searching(metrics), advance=advance, rerank=rerank)
    query_labels, nearest = labels[query][scores.queries], labels[searched][scores.nearest]
    if dataset.members is not None:  # it is no mistake to find an image that shares a label
        nearest = query_labels.where((dataset.members[query_labels] & dataset.members[nearest]).any(1), nearest)
    return Evaluation(
        scores=scores,
        labels=query_labels,
        nearest_labels=nearest,
        class_names=dataset.class_names,
        images=[dataset.key(index) for index in ids[query][scores.queries].tolist()],
        classes=len(labels[query].unique()),
        faults=embeddings.faults,
        alternative=alternative,
        rescoring=Rescoring(embeddings.points, manifold, score_form, lambda: embeddings.points),
    )


def _junk_notes(scores: Scores, labels: Tensor, query: Tensor, searched: Tensor) -> Iterator[str]:
    """Yield how many queries are not scored although the gallery has images of their class: those of their group."""
    rows = query.nonzero()[:, 0]
    is_scored = torch.zeros(len(rows), dtype=torch.bool)
    is_scored[scores.queries] = True
    unscored = rows[~is_scored]
    sizes = labels[searched].bincount(minlength=int(labels.max()) + 1)
    count = int((sizes[labels[unscored]] > searched[unscored].long()).sum())
    if count:
        subject = f"{count} of them" if count < len(unscored) else "all of them"
        yield f"{subject} have images of their class in their own group alone, so they are not scored"


def check_levels(metrics: Sequence[MetricConfig], dataset: Dataset) -> None:
    """Check that a dataset has the levels that metrics need."""
    for metric in metrics:
        if metric.uses_levels and not dataset.levels:
            raise ValueError(
                f"{metric.names()[0]}: the dataset has no levels; set dataset.levels, or remove the metric"
            )
        if metric.level not in (None, *dataset.levels):
            expected = ", ".join(dataset.levels)
            raise ValueError(f"{metric.names()[0]}: unknown level {metric.level!r}; expected one of {expected}")
