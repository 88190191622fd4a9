"""Why two images are similar: what each pair of their patches contributes to the similarity."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from math import isqrt, prod
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch
from pydantic import FiniteFloat
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dmlkit.datasets.files.dataset import Dataset
from dmlkit.distributed.launch import Ranks, start_ranks
from dmlkit.errors import UserError
from dmlkit.files.document import Document
from dmlkit.loading.inputs import inputs_of
from dmlkit.model import EmbeddingModel
from dmlkit.pooling import Cls, Pooling
from dmlkit.run_folder.folder import CheckpointName, RunFolder
from dmlkit.run_folder.threshold import threshold_of
from dmlkit.vectors.images import ImageList
from dmlkit.vectors.trained import TrainedModel, load_model

MEAN_OFF = 1e-4  # relative: the features of a network that averages differ from the mean of its map by rounding
PAINTED = 16  # images at once
AHEAD = 1e-6  # of the length: how far two parallel vectors are turned apart, since no direction is across them


class Explanation(Document, frozen=True):
    """Result of ``dmlkit why``."""

    kind: ClassVar[str] = "explanation of a similarity"

    weights: str
    """Fingerprint of the model."""
    a: str
    b: str
    similarity: str
    score: float
    """Similarity of the images."""
    threshold: float | None
    """Threshold of the run from which on images count as the same class; null if it is not calibrated."""
    grid: tuple[int, int]
    """Rows and columns of patches of each image, as the model sees it: resized and cropped."""
    contributions: tuple[tuple[FiniteFloat, ...], ...]
    """By patch of the first image, row by row, and patch of the second."""
    is_sum: bool
    """Whether the contributions sum to the score; false for a distance, which also depends on lengths."""
    spread: tuple[float, float]
    """Per image, the length of what belongs to no patch (biases, normalization layers) relative to the whole vector;
    it is spread evenly over the patches."""
    falls: tuple[tuple[FiniteFloat, ...], tuple[FiniteFloat, ...]]
    """Per image, by how much the score falls if each of its patches, row by row, is painted over."""

    def strongest(self, most: int) -> list[tuple[int, int, float]]:
        """Return the pairs of patches that contribute most: their positions, row by row, and the contribution."""
        values = torch.tensor(self.contributions, dtype=torch.float64)
        order = values.flatten().argsort(descending=True, stable=True)[:most]
        pairs = (divmod(position, values.shape[1]) for position in order.tolist())
        return [(a, b, float(values[a, b])) for a, b in pairs]


def explain(
    path: Path, a: Path, b: Path, *, checkpoint: CheckpointName | None = None, ranks: Ranks | None = None
) -> tuple[Explanation, Tensor]:
    """Explain by their patches how similar two images are to the model of a run.

    Returns:
        The explanation, and the images as the model sees them, (2, 3, S, S) uint8, resized and cropped.
    """
    run, ranks = RunFolder(path), ranks or start_ranks("auto")
    trained = load_model(run, ranks, checkpoint)
    if not trained.samples.has_pixels:
        raise UserError(f"{path}: this model takes {trained.samples.describe()}; expected a model of images")
    return explain_images(trained, ImageList([str(a), str(b)]), run)


def explain_images(trained: TrainedModel, images: Dataset, run: RunFolder | None) -> tuple[Explanation, Tensor]:
    """Explain how similar the two images of a dataset are to a model, see `explain`; its run has the threshold."""
    images.limit(trained.recipe.dataset.max_pixels)
    inputs = inputs_of(images, trained.recipe.transform, training=False)
    shown: list[Tensor] = []
    for index in range(2):
        item = inputs[index, 0]
        if not isinstance(item.input, Tensor):
            raise UserError(item.fault)
        shown.append(item.input)
    seen, source = torch.stack(shown), "this model" if run is None else str(run.path)
    on_device = seen.to(trained.device)
    parts = pair_contributions(trained.model, *on_device, source=source)
    threshold = None if run is None else threshold_of(run, trained.fingerprint)
    explanation = Explanation(
        weights=trained.fingerprint,
        a=images.paths[0],
        b=images.paths[1],
        similarity=trained.manifold.similarity_name,
        score=parts.score,
        threshold=None if threshold is None else threshold.threshold,
        grid=parts.grid,
        contributions=tuple(tuple(row) for row in parts.values.tolist()),
        is_sum=parts.is_sum,
        spread=parts.spread,
        falls=painted_falls(trained.model, on_device, parts.grid),
    )
    return explanation, seen


@torch.no_grad()
def painted_falls(
    model: EmbeddingModel, images: Tensor, grid: tuple[int, int]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return by how much the similarity of two images falls if a patch is painted over with the image's mean color.

    A patch of the last map sees most of the image, so its contribution does not say what the model sees at this place;
    this does, for the patches of each image (2, 3, S, S) uint8, row by row, at the price of a pass per patch.
    """
    wholes, manifold = model(images).double(), model.manifold
    score = manifold.paired_similarity(wholes[:1], wholes[1:])
    cells = torch.eye(prod(grid), device=images.device).reshape(-1, 1, *grid)
    masks = nn.functional.interpolate(cells, images.shape[2:], mode="nearest").bool()
    falls: list[tuple[float, ...]] = []
    for image, other in zip(images, wholes.flip(0), strict=True):
        color = image.float().mean((1, 2), keepdim=True).round().to(image.dtype)
        points = torch.cat([model(torch.where(block, color, image)) for block in masks.split(PAINTED)]).double()
        falls.append(tuple((score - manifold.paired_similarity(points, other.expand_as(points))).tolist()))
    return falls[0], falls[1]


class Contributions(NamedTuple):
    """What the pairs of patches of two images contribute to their similarity."""

    values: Tensor  # (P, P) float64
    grid: tuple[int, int]  # rows and columns; P is their product
    score: float
    is_sum: bool
    spread: tuple[float, float]


def pair_contributions(model: EmbeddingModel, a: Tensor, b: Tensor, *, source: str = "model") -> Contributions:
    r"""Compute what each pair of patches contributes to the similarity of two images.

    The vector z of an image, to which the manifold's map is applied, is a sum over patches p: the map of patch p enters
    the pooling, and its part of z is the derivative along it. Average and maximum pooling, GeM and linear layers lose
    nothing by this (Euler's theorem on homogeneous functions); biases and what normalization layers add is spread
    evenly. The contribution of a pair of patches is

    .. math:: c_{pq} = \frac{\partial s}{\partial \langle z, z' \rangle} \langle z_p, z'_q \rangle,

    with the lengths of z and z' fixed. A cosine, also one of log maps, is the sum of all contributions. For a
    distance, which depends on the lengths too, they are its gradient times the parts of the inner product. For heads
    with a bias in hyperbolic space the derivative is an approximation.

    Args:
        a, b: images (3, S, S) uint8, on the device of the model.

    Example:
        >>> from dmlkit.backbones import SmallCNN
        >>> from dmlkit.datasets.files.samples import samples_named
        >>> from dmlkit.heads import Linear
        >>> from dmlkit.manifolds import Sphere
        >>> head = Linear(16, Sphere(8))
        >>> model = EmbeddingModel(nn.Identity(), SmallCNN(width=4), head, samples_named("image").of(None)).eval()
        >>> contributions = pair_contributions(model, torch.rand(3, 16, 16), torch.rand(3, 16, 16))
        >>> contributions.values.shape, abs(float(contributions.values.sum()) - contributions.score) < 1e-5
        (torch.Size([16, 16]), True)
    """
    first, second = (patch_vectors(model, image, source) for image in (a, b))

    def similarity(x: Tensor, y: Tensor) -> Tensor:
        return model.manifold.paired_similarity(model.head.to_points(x[None]), model.head.to_points(y[None]))[0]

    factor = _per_inner_product(similarity, first.whole, second.whole)
    with torch.no_grad():
        score = float(similarity(first.whole, second.whole))
    values = factor * (first.parts @ second.parts.T)
    is_sum = abs(float(values.sum()) - score) < 1e-4 * max(1.0, abs(score))
    return Contributions(values.cpu(), first.grid, score, is_sum, (first.spread, second.spread))


class PatchVectors(NamedTuple):
    """Vector of an image, divided among the patches of its last map."""

    parts: Tensor  # (P, d) float64, which sum to the whole
    whole: Tensor  # (d,) float64: the head's projection of an image
    grid: tuple[int, int]
    spread: float


def patch_vectors(model: EmbeddingModel, image: Tensor, source: str = "model") -> PatchVectors:
    """Divide the head's projection of an image (3, S, S) among its patches, see `pair_contributions`."""
    maps, replaced = _last_map(model, image[None], source)
    with replaced(maps.requires_grad_()):
        outputs = model.head.project(model.backbone(model.normalization(image[None])))
    direction = torch.zeros_like(outputs, requires_grad=True)
    (slope,) = torch.autograd.grad(outputs, maps, direction, create_graph=True)  # linear in the direction
    maps = maps.detach()
    patches = torch.eye(prod(maps.shape[2:]), dtype=maps.dtype, device=maps.device).unflatten(1, maps.shape[2:])
    steps = (torch.autograd.grad(slope, direction, maps * patch, retain_graph=True)[0] for patch in patches)
    parts, whole = torch.cat(list(steps)).double(), outputs.detach().double()[0]
    remainder = whole - parts.sum(0)
    spread = float(remainder.norm() / whole.norm().clamp(min=torch.finfo(torch.float64).tiny))
    rows, columns = maps.shape[2:]
    if columns == 1 and isqrt(rows) ** 2 == rows:  # tokens of a transformer, in the order of a square grid
        rows = columns = isqrt(rows)
    return PatchVectors(parts + remainder / len(parts), whole, (rows, columns), spread)


def _last_map(model: EmbeddingModel, images: Tensor, source: str) -> tuple[Tensor, Callable[[Tensor], RemovableHandle]]:
    """Return the maps (B, C, H, W) from which the features of images are pooled, and a way to replace them."""
    pooling = next((module for module in model.backbone.modules() if isinstance(module, Pooling)), None)
    if isinstance(pooling, Cls):
        raise UserError(
            f"{source}: its features are the class token, which is not pooled from patches, so they have no parts; use "
            "a model whose backbone.pooling is avg, gem or max"
        )
    seen: list[tuple[nn.Module, Tensor]] = []

    def keep(module: nn.Module, inputs: tuple[Tensor, ...], output: object) -> None:
        maps = inputs[0] if module is pooling else output
        if isinstance(maps, Tensor) and maps.ndim == 4 and prod(maps.shape[2:]) > 1:
            seen.append((module, maps))

    watched = [pooling] if pooling is not None else list(model.backbone.modules())
    with ExitStack() as hooks, torch.no_grad():
        for module in watched:
            hooks.enter_context(module.register_forward_hook(keep))
        features = model.backbone(model.normalization(images))
    for module, maps in reversed(seen):
        means = maps.mean((2, 3))
        is_mean = means.shape == features.shape and (means - features).norm() <= MEAN_OFF * features.norm()
        if pooling is not None or is_mean:
            return maps.detach().clone(), partial(_replaced, module, at_input=pooling is not None)
    raise UserError(
        f"{source}: its features are not a mean over the positions of a map, so they have no parts; train with "
        "backbone.pooling: {name: avg}"
    )


def _replaced(module: nn.Module, maps: Tensor, *, at_input: bool) -> RemovableHandle:
    """Give a module another map, as its input or as its output, until the end of the handle's block."""

    def others(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (maps, *inputs[1:])

    def other(*_: object) -> Tensor:
        return maps

    return module.register_forward_pre_hook(others) if at_input else module.register_forward_hook(other)


def _per_inner_product(similarity: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor) -> float:
    """Return the derivative of the similarity of vectors (d,) by their inner product, at fixed lengths."""
    across = x - y * (x @ y) / (y @ y).clamp(min=torch.finfo(y.dtype).tiny)
    if across.norm() <= AHEAD * x.norm():  # parallel: one of them is turned a little
        turn = torch.zeros_like(x)
        turn[int(y.abs().argmin())] = 1
        turn = turn - y * (turn @ y) / (y @ y).clamp(min=torch.finfo(y.dtype).tiny)
        x = x + AHEAD * x.norm() * turn / turn.norm()
        across = x - y * (x @ y) / (y @ y)
    y = y.requires_grad_()
    (gradient,) = torch.autograd.grad(similarity(x, y), y)
    return float((gradient @ across) / (across @ across))
