"""Maps of embeddings to the plane: the Poincaré disk with its geodesics, t-SNE, and PCA."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dmlkit.errors import UserError
from dmlkit.manifolds.base import Manifold
from dmlkit.manifolds.lorentz import Lorentz
from dmlkit.manifolds.poincare import Poincare

ARC_POINTS = 30  # per drawn geodesic


def lies_in_disk(manifold: Manifold) -> bool:
    """Return whether the points of a manifold lie in the disk: it is hyperbolic, and has 2 dimensions."""
    return isinstance(manifold, Poincare | Lorentz) and manifold.dim == 2


def require_disk(manifold: Manifold) -> None:
    """Raise a `UserError` unless the points of a manifold lie in the disk."""
    if not lies_in_disk(manifold):
        raise UserError(
            f"plot disk: the disk shows 2-d embeddings on poincare or lorentz, got {manifold.dim}-d on "
            f"{type(manifold).__name__.lower()}; use dmlkit plot pca or dmlkit plot tsne, or train for the disk: "
            "--set manifold.name=poincare --set embedding_dim=2"
        )


def to_unit_disk(manifold: Manifold, points: Tensor) -> Tensor:
    """Map points to the unit disk, (N, 2), by an isometry up to the scale of the curvature."""
    require_disk(manifold)
    assert isinstance(manifold, (Poincare, Lorentz))
    root = (-manifold.curvature.detach()).sqrt()
    if isinstance(manifold, Poincare):
        return root * points
    return root * points[:, 1:] / (1 + root * points[:, :1])


def draw_disk(axes: Any, place: Tensor, labels: Tensor, colors: dict[int, Any]) -> None:
    """Draw the boundary, and a geodesic from the centroid of each class to each of its points, in the class's color."""
    from matplotlib.collections import LineCollection
    from matplotlib.patches import Circle

    axes.add_patch(Circle((0, 0), 1, fill=False, color="0.3"))
    axes.set(xlim=(-1.05, 1.05), ylim=(-1.05, 1.05))
    axes.axis("off")
    for label, color in colors.items():
        chosen = place[labels == label]
        arcs = list(geodesics(centroid(chosen), chosen).numpy())
        axes.add_collection(LineCollection(arcs, colors=[color], linewidths=0.5, alpha=0.5))


def lift(place: Tensor) -> Tensor:
    """Map points (..., 2) of the unit disk to points (..., 3) of the hyperboloid with K = -1."""
    squared = place.double().square().sum(-1, keepdim=True)
    return torch.cat([1 + squared, 2 * place], dim=-1) / (1 - squared)


def lower(space: Tensor) -> Tensor:
    """Project timelike vectors (..., 3) along their rays to points (..., 2) of the unit disk."""
    length = (space[..., :1].square() - space[..., 1:].square().sum(-1, keepdim=True)).clamp(min=1e-12).sqrt()
    return space[..., 1:] / (length + space[..., :1])


def centroid(place: Tensor) -> Tensor:
    """Compute the hyperbolic centroid (2,) of points (N, 2): the projection of their mean on the hyperboloid."""
    return lower(lift(place).mean(0))


def geodesics(start: Tensor, ends: Tensor) -> Tensor:
    """Compute arcs (N, 30, 2) from one point (2,) to points (N, 2), projected from straight lines above the disk."""
    share = torch.linspace(0, 1, ARC_POINTS, dtype=torch.float64)[:, None]
    return lower((1 - share) * lift(start) + share * lift(ends)[:, None])


PERPLEXITY = 30.0  # lowered for few points
EXAGGERATION = 12.0  # of the attraction, in the first of two phases
PHASES = ((125, EXAGGERATION, 0.8), (250, 1.0, 0.8))
"""Iterations, exaggeration and momentum of each phase. They are half of openTSNE's iterations: 2 400 points take 2 s
instead of 4, with a divergence of 0.31 instead of 0.28 (3 000 points in 600 clusters: 0.46 instead of 0.43)."""
STEPS = sum(steps for steps, _, _ in PHASES)
REPORT_EVERY = 25  # iterations
START = 1e-4  # standard deviation of the first coordinates
NEIGHBOR_ROWS = 512  # rows whose distances to all points are in memory at once: 20 MB for 10 000 points


@torch.no_grad()
def neighbor_plane(manifold: Manifold, points: Tensor, *, advance: Callable[[int], None] = lambda _: None) -> Tensor:
    """Compute t-SNE (van der Maaten & Hinton 2008) of the manifold's distances, (N, 2) float64, from `principal_plane`.

    The same input gives the same result. ``advance`` receives the progress in steps that add up to N.
    """
    try:
        from openTSNE import TSNEEmbedding
        from openTSNE.affinity import PerplexityBasedNN
        from openTSNE.nearest_neighbors import PrecomputedNeighbors
    except ImportError:
        raise UserError("t-SNE needs openTSNE; install it with: pip install 'dmlkit[tsne]'") from None

    count = len(points)
    perplexity = min(PERPLEXITY, (count - 1) / 3)
    blocks: list[tuple[Tensor, Tensor]] = []
    for rows in torch.arange(count).split(NEIGHBOR_ROWS):
        apart = manifold.distance(points[rows], points)
        apart[torch.arange(len(rows)), rows] = torch.inf
        blocks.append(apart.topk(max(1, int(3 * perplexity)), largest=False))
    distances, indices = (torch.cat(columns) for columns in zip(*blocks, strict=True))
    neighbors = PrecomputedNeighbors(indices.numpy(), distances.double().numpy())
    # one thread: two wait for each other 30 times as long as they work if another process uses one of two cores
    options: dict[str, Any] = {"perplexity": perplexity, "n_jobs": 1}
    affinities = PerplexityBasedNN(knn_index=neighbors, **options)
    start = principal_plane(manifold, points)
    start = START * start / start[:, 0].std().clamp(min=torch.finfo(start.dtype).tiny)
    embedding: Any = TSNEEmbedding(start.numpy(), affinities, negative_gradient_method="bh", n_jobs=1, random_state=0)
    done, reported = 0, 0

    def report(*_: Any) -> None:
        nonlocal done, reported
        done += REPORT_EVERY
        advance(done * count // STEPS - reported)
        reported = done * count // STEPS

    for steps, exaggeration, momentum in PHASES:
        options = {"exaggeration": exaggeration, "momentum": momentum, "inplace": True}
        embedding.optimize(steps, callbacks=[report], callbacks_every_iters=REPORT_EVERY, **options)
    return torch.from_numpy(embedding.view(type(start.numpy())).copy())


PRINCIPAL_ROWS = 8192  # in float64 at once: all of 60 000 x 512 with an SVD would take 1.5 GB more


@torch.no_grad()
def principal_plane(manifold: Manifold, points: Tensor) -> Tensor:
    """Compute the first two principal components (N, 2), in float64, of the features of points (N, D)."""
    features = [manifold.to_features(block) for block in points.split(PRINCIPAL_ROWS)]
    mean = torch.stack([block.double().sum(0) for block in features]).sum(0) / len(points)
    scatter = torch.zeros(len(mean), len(mean), dtype=torch.float64)
    for block in features:
        centered = block.double() - mean
        scatter += centered.T @ centered
    _, directions = torch.linalg.eigh(scatter)
    main = directions[:, -2:].flip(1)
    plane = torch.cat([(block.double() - mean) @ main for block in features])
    return torch.nn.functional.pad(plane, (0, 2 - plane.shape[1]))
