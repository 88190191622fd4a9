"""A newer model for older embeddings: a map of its points into the older space, put into the head of a copy of its run.

First the maps and their choice, then what they are worth for retrieval, and last the run.
"""

import os
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple
from uuid import uuid4

import numpy as np
import torch
from torch import Tensor

from dmlkit.datasets.files.dataset import Dataset, PickedSamples
from dmlkit.distributed.launch import start_ranks
from dmlkit.embedding.images import dataset_of
from dmlkit.embedding.manifest import Description
from dmlkit.embedding.points import BLOCK, PointSet
from dmlkit.embedding.progress_bar import Bar, no_bar
from dmlkit.embedding.sources import open_points
from dmlkit.embedding.stored import embed_files
from dmlkit.embedding.trained import ALIGNED, FROZEN, TrainedModel, describe, load_model
from dmlkit.errors import UserError
from dmlkit.files.outputs import check_place, writing
from dmlkit.files.source import NAMES, require_source
from dmlkit.heads.linear import Linear
from dmlkit.manifolds.base import Manifold
from dmlkit.manifolds.sphere import Sphere
from dmlkit.metrics.scoring import Scores, score_retrieval
from dmlkit.metrics.statistics import bootstrap_intervals, paired_differences
from dmlkit.recipe.file import dump_recipe, parse_recipe
from dmlkit.recipe.schema import Recipe
from dmlkit.run_folder.documents import Alignment, CrossFigures, PairedDifference, TrainingClasses
from dmlkit.run_folder.folder import CheckpointName, RunFolder

SHRINKAGES = (1.0, 0.1, 0.01, 0.001)
LEAST_LABELS = 20  # of which a quarter, 5, are measured: as many as an interval needs
FLAT = ("sphere", "euclidean")


class PointMap(NamedTuple):
    """Affine map of points."""

    matrix: Tensor  # (D', D) float64
    offset: Tensor  # (D',) float64

    def __call__(self, points: Tensor, space: Manifold) -> Tensor:
        """Map points (N, D) to points (N, D') of a space, float32."""
        return space.from_features((points.double() @ self.matrix.T + self.offset).float())


def fit_map(new: Tensor, old: Tensor, *, centered: bool, shrinkage: float | None = None) -> PointMap:
    r"""Fit a map from the space of a newer model to that of an older one, given the same images in both.

    The orthogonal map is the closest of those that keep all angles and lengths (Schönemann 1966): with X and Y the
    points as rows, and the singular value decomposition of the cross-covariance,

    .. math:: R = \arg\min_{R^T R = I} \| X R^T - Y \|_F^2 = U V^T, \quad Y^T X = U S V^T

    If the widths differ, its rows or columns are orthonormal. The linear map is a ridge regression that is pulled to
    the orthogonal map instead of to zero, so that few images lead to the orthogonal one:

    .. math:: M = \arg\min_M \| X M^T - Y \|_F^2 + \lambda \| M - R \|_F^2
            = (Y^T X + \lambda R)(X^T X + \lambda I)^{-1}

    Args:
        new: (N, D) points of the newer model.
        old: (N, D') points of the older model.
        centered: fit an offset too, as the difference of the means. On the sphere, where a point is a direction, the
            head could not compute it.
        shrinkage: lambda in units of the mean eigenvalue of X^T X; None for the orthogonal map.

    Example:
        >>> turn = torch.tensor([[0.0, -1.0], [1.0, 0.0]])
        >>> new = torch.randn(9, 2)
        >>> bool((fit_map(new, new @ turn.T, centered=False).matrix - turn).abs().max() < 1e-6)
        True
    """
    x, y = new.double(), old.double()
    means = [rows.mean(0) if centered else torch.zeros_like(rows[0]) for rows in (x, y)]
    x, y = x - means[0], y - means[1]
    left, _, right = torch.linalg.svd(y.T @ x, full_matrices=False)
    matrix = left @ right
    if shrinkage is not None:
        covariance = x.T @ x
        pull = shrinkage * covariance.trace() / len(covariance)
        identity = torch.eye(len(covariance), dtype=x.dtype)
        matrix = torch.linalg.solve(covariance + pull * identity, y.T @ x + pull * matrix, left=False)
    return PointMap(matrix, means[1] - matrix @ means[0])


class Parts(NamedTuple):
    """Images that fit, choose and measure."""

    fit: Tensor
    choose: Tensor
    measure: Tensor
    held_out: Literal["labels", "images"]


def split_images(labels: Sequence[str | None]) -> Parts:
    """Divide images into a half that fits, and quarters that choose and measure: whole labels if there are 20 or more.

    Example:
        >>> parts = split_images([None] * 8)
        >>> [len(part) for part in parts[:3]], parts.held_out
        ([4, 2, 2], 'images')
    """
    names = sorted({label for label in labels if label is not None})
    by_label = None not in labels and len(names) >= LEAST_LABELS
    codes = {name: code for code, name in enumerate(names)}
    groups = np.array([codes[str(label)] for label in labels]) if by_label else np.arange(len(labels))
    count = int(groups.max()) + 1
    place = np.random.default_rng(0).permutation(count)[groups] / count
    parts = (place < 0.5, (place >= 0.5) & (place < 0.75), place >= 0.75)
    rows = (torch.from_numpy(np.flatnonzero(part)) for part in parts)
    return Parts(*rows, held_out="labels" if by_label else "images")


@dataclass(frozen=True)
class SharedImages:
    """The same images in two spaces of the same kind.

    Args:
        new: (N, D) points of the newer model.
        old: (N, D') points of the older model.
        labels: N labels; None for an image without one.
        spaces: geometry of the newer and the older points: two spheres, or two Euclidean spaces.

    Example:
        >>> images = SharedImages(torch.eye(8), -torch.eye(8), [None] * 8, (Sphere(8), Sphere(8)))
        >>> images.choice()[2].map
        'orthogonal'
    """

    new: Tensor
    old: Tensor
    labels: Sequence[str | None]
    spaces: tuple[Manifold, Manifold]

    def choice(self) -> tuple[PointMap, Parts, "Chosen"]:
        """Return the map with the smallest error on the images that choose, fitted to them too, and the errors.

        The measured images neither fit nor choose it. Of equal maps, and below 1e-9, the orthogonal one is taken.
        """
        parts = split_images(self.labels)
        errors = {
            shrinkage: self.error(self.fit(parts.fit, shrinkage), parts.choose) for shrinkage in (None, *SHRINKAGES)
        }
        best = min(errors, key=lambda shrinkage: max(errors[shrinkage], 1e-9))
        both = torch.cat([parts.fit, parts.choose])
        named = {"orthogonal" if one is None else f"linear {one:g}": error for one, error in errors.items()}
        return self.fit(both, best), parts, Chosen("orthogonal" if best is None else "linear", best, named, len(both))

    def fit(self, rows: Tensor, shrinkage: float | None) -> PointMap:
        """Fit a map to some of the images, see `fit_map`."""
        centered = not isinstance(self.spaces[1], Sphere)
        return fit_map(self.new[rows], self.old[rows], centered=centered, shrinkage=shrinkage)

    def error(self, found: PointMap, rows: Tensor) -> float:
        """Compute the mean squared distance of mapped points from the older ones over some of the images."""
        apart = found(self.new[rows], self.spaces[1]).double() - self.old[rows].double()
        return float(apart.square().sum(1).mean())

    def figures(self, found: PointMap, parts: Parts) -> dict[str, Any]:
        """Measure retrieval within and between the models on the images that measure.

        Returns:
            The fields ``finds``, ``figures`` and ``gain`` of `Alignment`.
        """
        names = [self.labels[row] for row in parts.measure.tolist()]
        sizes = Counter(names)
        by_label = None not in sizes and len(sizes) > 1 and max(sizes.values()) > 1
        rows = torch.arange(len(names))
        codes = {name: code for code, name in enumerate(sizes)}
        labels = torch.tensor([codes[name] for name in names]) if by_label else rows
        old, new = self.old[parts.measure], self.new[parts.measure]
        mapped, space = found(new, self.spaces[1]), self.spaces[1]
        asked = {("new, mapped", "old"): (mapped, old, space), ("new, mapped", "new, mapped"): (mapped, mapped, space)}
        if new.shape == old.shape:
            asked = {("new", "old"): (new, old, space), **asked}
        asked = {("old", "old"): (old, old, space), ("new", "new"): (new, new, self.spaces[0]), **asked}
        others: Any = {"ids": rows, "gallery_ids": rows} if by_label else {}
        scores = {
            models: score_retrieval(points, labels, among, labels, manifold, ["recall@1", "map@r"], **others)
            for models, (points, among, manifold) in asked.items()
            if by_label or models[0] != models[1]  # each image finds itself
        }
        cross = scores["new, mapped", "old"]
        classes = labels[cross.queries] if by_label else None
        gain = paired_differences(scores["old", "old"].per_query, cross.per_query, classes) if by_label else {}
        return {
            "finds": "label" if by_label else "image",
            "figures": tuple(_figures(*models, one, classes) for models, one in scores.items()),
            "gain": {name: PairedDifference.model_validate(one.as_dict()) for name, one in gain.items()},
        }


class Chosen(NamedTuple):
    """Choice of a map."""

    map: Literal["orthogonal", "linear"]
    shrinkage: float | None
    errors: dict[str, float]
    fitted: int


def _figures(queries: str, gallery: str, scores: Scores, classes: Tensor | None) -> CrossFigures:
    ends = {name: one.ends for name, one in bootstrap_intervals(scores.per_query, classes).items()}
    return CrossFigures(queries=queries, gallery=gallery, metrics=scores.values, intervals=ends)


@torch.no_grad()
def align(
    older: Path,
    run: Path,
    images: Path,
    output: Path | None = None,
    *,
    checkpoint: CheckpointName | None = None,
    device: str = "auto",
    bar: Bar = no_bar,
) -> tuple[Alignment, Path]:
    """Map the model of a run into the space of older embeddings, and write it as a run.

    The map is folded into the linear head of the model, so that the new run embeds, searches and is exported as any
    other. Its embeddings are compared with the older ones; see `check_same_description`.

    Args:
        older: embeddings folder or gallery.
        run: the newer run.
        images: images, a folder or a table, see `images_at`; those that ``older`` has, by the path of their file.
        output: folder of the run to write. Default: that of ``run`` with ``-aligned`` at its end.
        checkpoint: checkpoint of the run. Default: best, otherwise last.
        device: device, see `start_ranks`.
        bar: shows the images.

    Returns:
        What was found, and the folder.

    Raises:
        UserError: a space is curved, the head is not linear, there are too few shared images, or the output exists.
    """
    kind = require_source(older)
    if kind not in ("embeddings", "gallery"):
        raise UserError(
            f"{older}: is {NAMES[kind]}; expected a folder of embeddings or a gallery, with paths of images"
        )
    output = output or run.parent / f"{run.name or run.resolve().name}-aligned"
    if output.exists():
        raise UserError(f"{output}: exists already; choose another --output")
    fabric, folder = start_ranks(device), RunFolder(run)
    trained, found = load_model(folder, fabric, checkpoint), open_points(older)
    check_place(output, [images, trained.recipe.dataset.data_root], is_run=True)
    manifest = found.manifest
    assert manifest is not None  # of embeddings and galleries
    check_can_be_mapped(trained, run, manifest, older)
    dataset, rows = shared_images(dataset_of(images, "test", trained.recipe), found)
    check_enough(len(dataset), trained, f"{images}: has {len(dataset)} images of {older}, compared by their paths")
    embedded = embed_files(trained, fabric, dataset, str(images), bar)
    dataset, rows = PickedSamples(dataset, embedded.indices, embedded.labels), rows[embedded.indices]
    check_enough(len(dataset), trained, f"{images}: {len(dataset)} images of {older} can be read")
    for _ in found.blocks(BLOCK):
        pass  # a damaged row would spoil the map
    labels = [item.label for item in found.items_at(rows)]
    own = dataset.label_names(dataset.labels)
    shared = SharedImages(
        embedded.points,
        found.points_at(rows),
        [label or other for label, other in zip(labels, own, strict=True)],
        (trained.recipe.manifold.build(trained.recipe.embedding_dim), found.manifold),
    )
    point_map, parts, chosen = shared.choice()
    alignment = Alignment(
        embeddings=str(older),
        fingerprint=manifest.space,
        run=str(run),
        **chosen._asdict(),
        measured=len(parts.measure),
        held_out=parts.held_out,
        **shared.figures(point_map, parts),
    )
    write_aligned(folder, trained, manifest, point_map, alignment, output)
    return alignment, output


def check_enough(count: int, trained: TrainedModel, found: str) -> None:
    """Raise an error unless there are twice as many images as dimensions, of which half fit the map.

    Raises:
        UserError: there are fewer; the message starts with what was found.
    """
    least = 2 * trained.manifold.dim
    if count < least:
        raise UserError(
            f"{found}; expected at least {least}, twice the {trained.manifold.dim} dimensions of the newer run: "
            "name more of the older images"
        )


def check_can_be_mapped(trained: TrainedModel, run: Path, older: Description, where: Path) -> None:
    """Raise an error unless a linear map can be put into the head of a model and lead into the older space.

    Args:
        trained: the newer model.
        run: its folder.
        older: description of the older embeddings.
        where: their path.

    Raises:
        UserError: it cannot.
    """
    recipe, spaces = trained.recipe, (trained.recipe.manifold.name, older.manifold.name)
    if describe(trained).space == older.space:
        raise UserError(f"{run}: its embeddings can be compared with {where} already; use them as they are")
    if older.fusion is not None:
        raise UserError(f"{where}: has embeddings of two runs; expected those of one: embed with the first run alone")
    for name, space in zip((run, where), spaces, strict=True):
        if space not in FLAT:
            raise UserError(
                f"{name}: its manifold {space} is curved, so that a linear map moves points off it; expected "
                f"{' or '.join(FLAT)}: embed the images again instead"
            )
    if spaces[0] != spaces[1]:
        raise UserError(
            f"{run}: has points on {spaces[0]}, but {where} on {spaces[1]}; a linear map does not lead from one to "
            f"the other: train on {spaces[1]}"
        )
    if not isinstance(recipe.head, Linear.Config):
        raise UserError(f"{run}: has the head {recipe.head.name}; expected linear, into which a map can be put")
    if getattr(recipe.manifold, "clip_distance", None) is not None:
        raise UserError(
            f"{run}: manifold.clip_distance shortens points, which a linear map before it cannot; train without it"
        )


def shared_images(dataset: Dataset, older: PointSet) -> tuple[Dataset, Tensor]:
    """Return the images that older points have too, by the path of their file, links resolved; and their rows there.

    An image that has several points, such as one with several boxes, is left out.
    """
    places, paths = ([os.path.realpath(path) for path in one.paths] for one in (older, dataset))
    counts = Counter(places), Counter(paths)
    rows = {path: row for row, path in enumerate(places) if counts[0][path] == 1}
    kept = [index for index, path in enumerate(paths) if path in rows and counts[1][path] == 1]
    picked = torch.tensor(kept, dtype=torch.int64)
    of_older = torch.tensor([rows[paths[index]] for index in kept], dtype=torch.int64)
    return PickedSamples(dataset, picked, dataset.labels[picked]), of_older


def write_aligned(
    run: RunFolder,
    trained: TrainedModel,
    older: Description,
    point_map: PointMap,
    alignment: Alignment,
    output: Path,
) -> None:
    """Write a copy of a run whose head contains a map, completely or not at all.

    Raises:
        UserError: the recipe does not allow the older width, or the folder cannot be written.
    """
    recipe = _mapped_recipe(run, trained, older)
    state = run.load_checkpoint(trained.checkpoint)
    weights = {
        name: state["model"][f"head.linear.{name}"]
        for name in ("weight", "bias")
        if f"head.linear.{name}" in state["model"]
    }
    bias = weights.get("bias", torch.zeros(trained.manifold.dim)).double()
    state["model"]["head.linear.weight"] = (point_map.matrix @ weights["weight"].double()).float()
    if recipe.head.model_dump()["bias"]:
        state["model"]["head.linear.bias"] = (point_map.matrix @ bias + point_map.offset).float()
    kept = {name: value for name, value in state.items() if name in ("num_features", "model", "epoch", FROZEN)}
    with writing(output):
        output.parent.mkdir(parents=True, exist_ok=True)
        partial = RunFolder(output.with_name(f".{output.name}.{uuid4().hex}"))
        try:
            partial.create(recipe, overwrite=False)
            if run.classes_path.exists():
                TrainingClasses.read(run.classes_path).write(partial.classes_path)
            alignment.write(partial.alignment_path)
            kept |= {"recipe": dump_recipe(recipe), "objective": {}, ALIGNED: older.space}
            partial.save_checkpoint("best", kept)
            partial.path.rename(output)
        finally:
            if partial.path.exists():
                shutil.rmtree(partial.path)


def _mapped_recipe(run: RunFolder, trained: TrainedModel, older: Description) -> Recipe:
    """Return the recipe of a run with the width and the space of older embeddings."""
    recipe = run.recipe()
    head = recipe.head
    if not isinstance(trained.recipe.manifold, Sphere.Config):
        head = head.model_copy(update={"bias": True})
    changes = {"embedding_dim": older.features, "manifold": older.manifold, "head": head}
    text = dump_recipe(recipe.model_copy(update=changes))
    return parse_recipe(text, f"{run.recipe_path} with embedding_dim {older.features}", is_trained=True)
