"""Choice of the weights with which the similarities of two runs are added, on validation classes."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dmlkit.distributed.launch import Ranks, start_ranks
from dmlkit.errors import UserError
from dmlkit.evaluation.pair_probability import sampled_pairs
from dmlkit.files.source import check_options, kind_of, place_of_run, require_run
from dmlkit.gallery.manifest import read_gallery_manifest
from dmlkit.identify.probability import FOLDS, fit_sigmoid
from dmlkit.manifolds.base import Manifold
from dmlkit.manifolds.sphere import Sphere
from dmlkit.metrics.base import Labeled
from dmlkit.metrics.reliability import balanced
from dmlkit.metrics.scoring import score_retrieval
from dmlkit.nearest.rescore import Rescorer
from dmlkit.run_folder.folder import CheckpointName, RunFolder
from dmlkit.vectors.fusion import check_fusible, join
from dmlkit.vectors.manifest import Fusion
from dmlkit.vectors.progress_bar import Bar, no_bar
from dmlkit.vectors.store import hash_images
from dmlkit.vectors.stored import split_embeddings
from dmlkit.vectors.trained import load_model

Weights = Literal["mean", "logistic"]
LEAST = 3  # validation classes
WEIGHTS: tuple[Weights, ...] = ("mean", "logistic")


def fusion_of(source: Path, other: Path | None, *, device: str = "auto", bar: Bar = no_bar) -> Fusion | None:
    """Return the fusion that ``--with`` asks for; None without it.

    Args:
        source: a run; or a gallery of two runs, whose second run is named because it has moved; see `Fusion`.
    """
    if other is None:
        return None
    kind = kind_of(source)
    check_options(source, kind, {"--with": other})
    if kind == "run":
        return choose_fusion(source, other, fabric=start_ranks(device), bar=bar)
    stored = read_gallery_manifest(source).fusion
    if stored is None:
        raise UserError(
            f"--with {other}: {source} has embeddings of one run; create a gallery of both with dmlkit gallery create "
            f"RUN IMAGES --with {other}"
        )
    return stored.model_copy(update={"run": str(place_of_run(other))})


@torch.no_grad()  # the curvature of a manifold may be learned
def choose_fusion(
    run: Path, other: Path, *, checkpoint: CheckpointName | None = None, fabric: Ranks, bar: Bar = no_bar
) -> Fusion:
    """Choose the weights of the similarities of two runs on their validation classes.

    Two weights are fitted to pairs of images; the one with the higher map@r of classes that did not fit it is taken:

    - ``mean``: each similarity is calibrated alone (Platt 1999), and the logits are averaged. They are linear in the
      similarity, so that the weights are proportional to their slopes. This is the fusion of WildFusion (Cermak et al.
      2024, arXiv:2408.12934), with logistic calibration.
    - ``logistic``: both similarities are the features of one logistic regression.

    Args:
        checkpoint: checkpoint of the first run. Default: best, otherwise last; of the second run always this.
    """
    require_run(other)
    folders = RunFolder(run), RunFolder(other)
    models = load_model(folders[0], fabric, checkpoint), load_model(folders[1], fabric)
    check_fusible(*models, other)
    models[0].recipe.dataset.require_one_label(f"--with {other}")
    dataset, theirs = (model.recipe.dataset.build("validation") for model in models)
    hashes = [hash_images(one, models[0].recipe.dataset) for one in (dataset, theirs)]
    trained = [set(folder.training_classes()) for folder in folders]
    if hashes[0] != hashes[1] or trained[0] != trained[1]:
        raise UserError(
            f"--with {other}: was trained on other classes, or validated on other images, than {run}; a fusion needs "
            "classes that are new to both: train two runs with the same dataset"
        )
    found = [
        split_embeddings(folder, model, fabric, dataset, "validation", bar=bar)
        for folder, model in zip(folders, models, strict=True)
    ]
    kept = [torch.isin(one.indices, two.indices) for one, two in (found, found[::-1])]
    spaces = [deepcopy(model.manifold).cpu() for model in models]
    points = [one.points[rows] for one, rows in zip(found, kept, strict=True)]
    labels = found[0].labels[kept[0]]
    choice = weigh_models(spaces, points, labels).choice()
    second = models[1]
    return Fusion(
        run=str(place_of_run(other)), checkpoint=second.checkpoint, fingerprint=second.fingerprint, **choice._asdict()
    )


class WeightChoice(NamedTuple):
    """Weight of a second similarity, as `Fusion` has it."""

    weights: Weights
    share: float
    alone: float | None
    """map@r without it; None for fewer than 3 classes, like the next one."""
    together: float | None
    """map@r with it."""


class Weighing:
    """Choice of the weight of a second similarity.

    Args:
        labels: (N,) int64, classes of the images.
        pairs: rows (P,) of the first and second images of the pairs that fit the weight.
        scores: both similarities of the pairs, (P,) float64 each.
        map_at_r: returns for a share of the second similarity the map@r of those of the images asked (N,) bool that
            have others of their class.
    """

    def __init__(
        self,
        labels: Tensor,
        pairs: tuple[Tensor, Tensor],
        scores: Sequence[np.ndarray],
        map_at_r: Callable[[float, Tensor], Tensor],
    ) -> None:
        self.labels, self.scores, self.map_at_r = labels, scores, map_at_r
        self.classes = labels.numpy()[np.stack(pairs, axis=1)]

    def choice(self) -> WeightChoice:
        """Choose the share of the second similarity.

        For fewer than 3 classes, of which two fit the weights, these are the mean, and the map@r is not measured.
        """
        names, codes = self.labels.unique(return_inverse=True)
        everything = np.ones(len(self.classes), bool)
        if len(names) < LEAST:
            return WeightChoice("mean", self.share("mean", everything), None, None)
        count = min(FOLDS, len(names))
        of_classes = np.random.default_rng(0).permutation(len(names)) % count
        folds, of_pairs = of_classes[codes], of_classes[np.searchsorted(names.numpy(), self.classes)]
        values: dict[str, list[Tensor]] = {name: [] for name in ("alone", *WEIGHTS)}
        for fold in range(count):
            others = (of_pairs != fold).all(axis=1)
            shares = {"alone": 0.0, **{weights: self.share(weights, others) for weights in WEIGHTS}}
            for name, share in shares.items():
                values[name].append(self.map_at_r(share, torch.from_numpy(folds == fold)))
        means = {name: float(torch.cat(found).mean()) for name, found in values.items()}
        best = max(WEIGHTS, key=lambda weights: means[weights])
        return WeightChoice(best, self.share(best, everything), means["alone"], means[best])

    def share(self, weights: Weights, pairs: np.ndarray) -> float:
        """Fit the share of the second model to some of the pairs (P,) bool."""
        same = (self.classes[:, 0] == self.classes[:, 1])[pairs]
        first, second = (scores[pairs] for scores in self.scores)
        balance = balanced(np.ones(len(same)), same)
        if weights == "logistic":
            fitted = fit_sigmoid(first, second, same, balance)
            slopes = fitted.margin_slope, fitted.score_slope
        else:
            nothing = np.zeros_like(first)
            alone = [fit_sigmoid(nothing, scores, same, balance) for scores in (first, second)]
            slopes = alone[0].score_slope, alone[1].score_slope
        return slopes[1] / sum(slopes) if sum(slopes) else 0.5


def weigh_models(manifolds: Sequence[Manifold], points: Sequence[Tensor], labels: Tensor) -> Weighing:
    """Return the choice of the weight of the second of two models, given points of the same images (N,) by both."""
    pairs = sampled_pairs(labels)

    def joined_map(share: float, asked: Tensor) -> Tensor:
        both = join(manifolds, points, share)
        return map_at_r(both, labels, Sphere(both.shape[1]), asked)

    scores = [similarities_of(space, own, *pairs) for space, own in zip(manifolds, points, strict=True)]
    return Weighing(labels, pairs, scores, joined_map)


def map_at_r(
    points: Tensor, labels: Tensor, manifold: Manifold, asked: Tensor, rescorer: Rescorer | None = None
) -> Tensor:
    """Return the map@r of those of the images asked (N,) bool, among all, that have others of their class."""
    rows = torch.arange(len(points))
    queries = Labeled(points[asked], labels[asked], rows[asked])
    second = None if rescorer is None else rescorer.between(rows[asked], rows)
    found = score_retrieval(queries, Labeled(points, labels, rows), manifold, ["map@r"], rerank=second)
    return found.per_query["map@r"]


def similarities_of(manifold: Manifold, points: Tensor, first: Tensor, second: Tensor) -> np.ndarray:
    """Return the similarities (P,) float64 of pairs of rows of points, computed for 65 536 pairs at once."""
    blocks = zip(first.split(2**16), second.split(2**16), strict=True)
    found = [manifold.paired_similarity(points[one].double(), points[other].double()) for one, other in blocks]
    return torch.cat(found).numpy()
