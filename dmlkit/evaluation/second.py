"""The similarity that ``--with`` adds, of a second run or of local features, and its weight.

The weight is chosen on validation classes. First comes what both have in common, then one after the other.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dmlkit.datasets.files.dataset import Dataset
from dmlkit.distributed.launch import Ranks, start_ranks
from dmlkit.errors import UserError
from dmlkit.evaluation.calibration import sampled_pairs
from dmlkit.files.escape import command_word
from dmlkit.files.source import LOCAL, PARTNERS, check_options, kind_of, place_of_run
from dmlkit.gallery.manifest import GalleryManifest
from dmlkit.identify.probability import FOLDS, fit_sigmoid
from dmlkit.loading.inputs import refuse_faults
from dmlkit.manifolds.base import Manifold
from dmlkit.manifolds.sphere import Sphere
from dmlkit.metrics.base import Labeled
from dmlkit.metrics.reliability import balanced
from dmlkit.metrics.scoring import score_retrieval
from dmlkit.nearest.rescore import CANDIDATES, Rescorer, match_scores, nearest_rows
from dmlkit.run_folder.folder import CheckpointName, RunFolder
from dmlkit.vectors.fusion import check_fusible, join, require_torch
from dmlkit.vectors.in_memory import BLOCK, Embeddings, centered, features_of
from dmlkit.vectors.manifest import Fusion, LocalFusion
from dmlkit.vectors.progress_bar import Bar, no_bar
from dmlkit.vectors.store import hash_images
from dmlkit.vectors.stored import split_embeddings
from dmlkit.vectors.trained import TrainedModel, load_model

REPAIR = "repair or remove it"  # --with takes the dataset of the run as it is: it excludes --set
LEAST = 3  # validation classes with two images, of different groups if there are any
Weights = Literal["mean", "logistic"]
WEIGHTS: tuple[Weights, ...] = ("mean", "logistic")


class WeightChoice(NamedTuple):
    """Weight of a second similarity, as `Fusion` and `LocalFusion` have it."""

    weights: Weights
    share: float
    alone: float | None  # map@r without it; None for fewer than 3 classes with two groups, like the next one
    together: float | None  # map@r with it


def fitted_share(weights: Weights, scores: Sequence[np.ndarray], same: np.ndarray) -> float:
    """Fit the share of the second of two similarities, (P,) float64 each, to pairs of one class or not, (P,) bool.

    Pairs of one kind alone say nothing of it: then it is half.
    """
    if same.all() or not same.any():
        return 0.5
    first, second = scores
    balance = balanced(np.ones(len(same)), same)
    if weights == "logistic":
        fitted = fit_sigmoid(first, second, same, balance)
        slopes = fitted.margin_slope, fitted.score_slope
    else:
        nothing = np.zeros_like(first)
        alone = [fit_sigmoid(nothing, similarities, same, balance) for similarities in scores]
        slopes = alone[0].score_slope, alone[1].score_slope
    return slopes[1] / sum(slopes) if sum(slopes) else 0.5


def choose_weight(
    labels: Tensor,
    groups: Tensor,
    pairs: tuple[Tensor, Tensor],
    scores: Sequence[np.ndarray],
    measure: Callable[[float, Tensor], Tensor],
) -> WeightChoice:
    """Choose the share of a second similarity.

    For fewer than 3 classes with two groups, of which two fit the weights, these are the mean, and the map@r is not
    measured.

    Args:
        labels: (N,) int64, classes of the images.
        groups: (N,) int64, images of one group form no pair.
        pairs: rows (P,) of the first and second images of the pairs that fit the weight.
        scores: both similarities of the pairs, (P,) float64 each.
        measure: returns for a share of the second similarity the map@r of those of the images asked (N,) bool that
            have others of their class.
    """
    names, codes, counts = groups_of_classes(labels, groups)
    classes = labels.numpy()[np.stack(pairs, axis=1)]
    same, means = classes[:, 0] == classes[:, 1], dict[str, float]()
    best: Weights = "mean"
    if (counts > 1).sum() >= LEAST:
        count = min(FOLDS, len(names))
        of_classes = np.random.default_rng(0).permutation(len(names)) % count
        folds, of_pairs = of_classes[codes], of_classes[np.searchsorted(names.numpy(), classes)]
        values: dict[str, list[Tensor]] = {name: [] for name in ("alone", *WEIGHTS)}
        for fold in range(count):
            others = (of_pairs != fold).all(axis=1)
            fitting = [similarities[others] for similarities in scores]
            shares = {"alone": 0.0, **{weights: fitted_share(weights, fitting, same[others]) for weights in WEIGHTS}}
            for name, share in shares.items():
                values[name].append(measure(share, torch.from_numpy(folds == fold)))
        means = {name: float(torch.cat(parts).mean()) for name, parts in values.items()}
        best = max(WEIGHTS, key=means.__getitem__)
    return WeightChoice(best, fitted_share(best, scores, same), means.get("alone"), means.get(best))


def groups_of_classes(labels: Tensor, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the classes (C,), that of each image (N,) as its place among them, and how many groups each has (C,)."""
    names, codes = labels.unique(return_inverse=True)
    return names, codes, torch.stack([codes, groups]).unique(dim=1)[0].bincount()


def map_at_r(
    points: Tensor, labels: Tensor, groups: Tensor, manifold: Manifold, asked: Tensor, rescorer: Rescorer | None = None
) -> Tensor:
    """Return the map@r of those of the images asked (N,) bool, among all, that have others of their class.

    Images of the group of an image are not searched for it.
    """
    _, codes, counts = groups_of_classes(labels, groups)
    asked = asked & (counts > 1)[codes]
    if not asked.any():  # classes of one image may fill a fold
        return torch.empty(0, dtype=torch.float64)
    rows = torch.arange(len(points))
    queries = Labeled(points[asked], labels[asked], groups[asked])
    second = None if rescorer is None else rescorer.between(rows[asked], rows)
    scores = score_retrieval(queries, Labeled(points, labels, groups), manifold, ["map@r"], rerank=second)
    return scores.per_query["map@r"]


def similarities_of(manifold: Manifold, points: Tensor, first: Tensor, second: Tensor) -> np.ndarray:
    """Return the similarities (P,) float64 of pairs of rows of points, computed for 65 536 pairs at once."""
    blocks = zip(first.split(2**16), second.split(2**16), strict=True)
    similarities = [manifold.paired_similarity(points[one].double(), points[other].double()) for one, other in blocks]
    return torch.cat(similarities).numpy()


def choose_second(
    run: Path, other: Path, *, checkpoint: CheckpointName | None = None, ranks: Ranks, bar: Bar = no_bar
) -> Fusion:
    """Choose the weight of the similarity of a second run or of one of `PARTNERS`, on a run's validation classes."""
    folder = RunFolder(run)
    trained = load_model(folder, ranks, checkpoint)
    if other in PARTNERS:
        return choose_local(folder, trained, ranks, bar)[0]
    return choose_fusion(folder, trained, other, ranks, bar)


def fusion_of(source: Path, other: Path | None, *, device: str = "auto", bar: Bar = no_bar) -> Fusion | None:
    """Return the fusion that ``--with`` asks for, for a run, or a gallery whose second run has moved; None without."""
    if other is None:
        return None
    kind = kind_of(source)
    check_options(source, kind, {"--with": other})
    if kind == "run":
        ranks, folder = start_ranks(device), RunFolder(source)  # ``local`` is a run in a folder of this name here
        return choose_fusion(folder, load_model(folder, ranks), other, ranks, bar)
    stored = GalleryManifest.of(source).fusion
    if stored is None:
        raise UserError(
            f"--with {other}: {source} has embeddings of one run; create a gallery of both with dmlkit gallery create "
            f"RUN IMAGES --with {command_word(other)}"
        )
    return stored.model_copy(update={"run": str(place_of_run(other))})


@torch.no_grad()  # the curvature of a manifold may be learned
def choose_fusion(run: RunFolder, trained: TrainedModel, other: Path, ranks: Ranks, bar: Bar = no_bar) -> Fusion:
    """Choose the weights of the similarities of two runs on their validation classes.

    Two weights are fitted to pairs of images; the one with the higher map@r of classes that did not fit it is taken:

    - ``mean``: each similarity is calibrated alone (Platt 1999), and the logits are averaged. They are linear in the
      similarity, so that the weights are proportional to their slopes. This is the fusion of WildFusion (Cermak et al.
      2024, arXiv:2408.12934), with logistic calibration.
    - ``logistic``: both similarities are the features of one logistic regression.
    """
    folders = run, RunFolder(other)
    models = trained, load_model(folders[1], ranks)
    check_fusible(*models, other)
    trained.recipe.dataset.require_one_label(f"--with {other}")
    dataset, theirs = (model.recipe.dataset.build("validation") for model in models)
    hashes = [hash_images(images, trained.recipe.dataset) for images in (dataset, theirs)]
    classes = [set(folder.training_classes()) for folder in folders]
    if hashes[0] != hashes[1] or classes[0] != classes[1]:
        raise UserError(
            f"--with {other}: was trained on other classes, or validated on other images, than {run.path}; a fusion "
            "needs classes that are new to both: train two runs with the same dataset"
        )
    embeddings = [
        split_embeddings(folder, model, ranks, dataset, "validation", bar=bar)
        for folder, model in zip(folders, models, strict=True)
    ]
    for side in embeddings:
        refuse_faults(side.faults, trained.recipe.dataset.on_bad_image, REPAIR)
    in_both = [torch.isin(one.indices, two.indices) for one, two in (embeddings, embeddings[::-1])]
    spaces = [deepcopy(model.manifold).cpu() for model in models]
    points = [side.points[rows] for side, rows in zip(embeddings, in_both, strict=True)]
    rows, labels = embeddings[0].indices[in_both[0]], embeddings[0].labels[in_both[0]]
    choice = weigh_models(spaces, points, labels, dataset.groups_of(rows))
    _, second = models
    place = str(place_of_run(other))
    return Fusion(run=place, checkpoint=second.checkpoint, fingerprint=second.fingerprint, **choice._asdict())


def weigh_models(
    manifolds: Sequence[Manifold], points: Sequence[Tensor], labels: Tensor, groups: Tensor
) -> WeightChoice:
    """Choose the weight of the second of two models, given points of the same images (N,) by both."""
    pairs = sampled_pairs(labels, groups)

    def joined_map(share: float, asked: Tensor) -> Tensor:
        joined = join(manifolds, points, share)
        return map_at_r(joined, labels, groups, Sphere(joined.shape[1]), asked)

    scores = [similarities_of(space, side, *pairs) for space, side in zip(manifolds, points, strict=True)]
    return choose_weight(labels, groups, pairs, scores, joined_map)


ROWS = 16  # whose pairs are matched at once


def choose_local(
    run: RunFolder, trained: TrainedModel, ranks: Ranks, bar: Bar
) -> tuple[LocalFusion, Embeddings, Tensor]:
    """Choose the weight of local scores on the validation classes of a run, as `choose_fusion` does.

    The pairs are those of each validation image and its nearest candidates.

    Returns:
        The weight, and the embeddings and local features (N, P, C) float16 of the validation images.
    """
    trained.recipe.dataset.require_one_label(f"--with {LOCAL}")
    require_torch(trained)
    dataset = trained.recipe.dataset.build("validation")
    embeddings = split_embeddings(run, trained, ranks, dataset, "validation", bar=bar)
    refuse_faults(embeddings.faults, trained.recipe.dataset.on_bad_image, REPAIR)
    features, mean = local_features(trained, ranks, dataset, embeddings, bar)
    with bar("matching images", len(embeddings.points)) as advance, torch.no_grad():
        scores = match_scores(features.__getitem__, advance)
        groups, rescorer = dataset.groups_of(embeddings.indices), Rescorer(scores, 0.0, CANDIDATES)
        choice = weigh_scores(embeddings, groups, deepcopy(trained.manifold).cpu(), rescorer)
    fusion = LocalFusion(
        run=LOCAL,
        checkpoint=trained.checkpoint,
        fingerprint=trained.fingerprint,
        **choice._asdict(),
        mean=tuple(mean.tolist()),
        shape=(features.shape[1], features.shape[2]),
    )
    return fusion, embeddings, features


def weigh_scores(embeddings: Embeddings, groups: Tensor, manifold: Manifold, rescorer: Rescorer) -> WeightChoice:
    """Choose the weight of the scores of each image's nearest ones, each of which is computed once."""
    from scipy.sparse import csr_array, vstack

    points, labels, size = embeddings.points, embeddings.labels, len(embeddings.points)
    blocks, parts = list[tuple[Tensor, Tensor]](), list[Any]()
    for rows in torch.arange(size).split(ROWS):
        nearest = nearest_rows(manifold.exact_similarity(points[rows], points), rescorer.most)
        blocks.append((nearest, rescorer.score(rows, nearest)))
        starts = torch.arange(len(rows) + 1) * nearest.shape[1]
        columns = (column.flatten().numpy() for column in reversed(blocks[-1]))
        parts.append(csr_array((*columns, starts.numpy()), (len(rows), size)))
    table = csr_array(vstack(parts))

    def known(rows: Tensor, items: Tensor) -> Tensor:
        return torch.from_numpy(table[rows.numpy()].toarray()).gather(1, items)

    def mixed_map(share: float, asked: Tensor) -> Tensor:
        return map_at_r(points, labels, groups, manifold, asked, replace(rescorer, share=share, score=known))

    second, scores = (torch.cat(column) for column in zip(*blocks, strict=True))
    first = torch.arange(size)[:, None].expand_as(second)
    others = groups[first] != groups[second]
    pairs = first[others], second[others]
    pair_scores = [similarities_of(manifold, points, *pairs), scores[others].numpy()]
    return choose_weight(labels, groups, pairs, pair_scores, mixed_map)


def by_features(features: Tensor, fusion: Fusion) -> Rescorer:
    """Return the local scores of images by the rows of their features (N, P, C) float16."""
    return Rescorer(match_scores(features.__getitem__), fusion.share, CANDIDATES)


def local_features(
    trained: TrainedModel, ranks: Ranks, dataset: Dataset, embeddings: Embeddings, bar: Bar
) -> tuple[Tensor, Tensor]:
    """Return local features (N, P, C) of images, and the mean (C,) of all patches."""
    maps = features_of(None, trained, ranks, dataset, embeddings.indices, bar)
    mean = torch.stack([part.float().mean((0, 1)) for part in maps.split(BLOCK)]).mean(0)
    return centered(maps, mean), mean
