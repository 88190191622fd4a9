"""t-SNE of points of a manifold: what is near stays near in a plane."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dmlkit.geometry.principal_plane import principal_plane
from dmlkit.manifolds.base import Manifold

PERPLEXITY = 30.0  # lowered for few points
EXAGGERATION = 12.0  # of the attraction, in the first of two phases
PHASES = ((125, EXAGGERATION, 0.8), (250, 1.0, 0.8))
"""Iterations, exaggeration, momentum. Half of openTSNE's iterations: of 2 400 points 2 s instead of 4, and a divergence
of 0.31 instead of 0.28 (0.46 and 0.43 of 3 000 points in 600 clusters)."""
STEPS = sum(steps for steps, _, _ in PHASES)
STEPS_TOLD = 25
START = 1e-4  # standard deviation of the first coordinates
ROWS = 512  # whose distances to all points are in memory at once: 20 MB of 10 000 points


@torch.no_grad()
def neighbor_plane(manifold: Manifold, points: Tensor, *, advance: Callable[[int], None] = lambda _: None) -> Tensor:
    """t-SNE (van der Maaten & Hinton 2008) of the manifold's distances, which starts at the main directions.

    Args:
        manifold: whose distance tells who is near.
        points: (N, D), N at least 3.
        advance: told N in all, little by little.

    Returns:
        (N, 2) float64, the same each time.

    Example:
        >>> from dmlkit.manifolds import Euclidean
        >>> line = torch.cat([torch.linspace(0, 1, 20), torch.linspace(9, 10, 20)])[:, None]
        >>> place = neighbor_plane(Euclidean(1), line)
        >>> sides = place[:20, 0], place[20:, 0]
        >>> bool(sides[0].max() < sides[1].min() or sides[1].max() < sides[0].min())
        True
    """
    from openTSNE import TSNEEmbedding
    from openTSNE.affinity import PerplexityBasedNN
    from openTSNE.nearest_neighbors import PrecomputedNeighbors

    count = len(points)
    perplexity = min(PERPLEXITY, (count - 1) / 3)
    distances, indices = _nearest(manifold, points, max(1, int(3 * perplexity)))
    # one thread: two wait for each other 30 times as long as they work, where another process has one of two cores
    options: dict[str, Any] = {"perplexity": perplexity, "n_jobs": 1}
    affinities = PerplexityBasedNN(knn_index=PrecomputedNeighbors(indices.numpy(), distances.numpy()), **options)
    start = principal_plane(manifold, points)
    start = START * start / start[:, 0].std().clamp(min=torch.finfo(start.dtype).tiny)
    place: Any = TSNEEmbedding(start.numpy(), affinities, negative_gradient_method="bh", n_jobs=1, random_state=0)
    done, told = 0, 0

    def tell(*_: Any) -> None:
        nonlocal done, told
        done += STEPS_TOLD
        advance(done * count // STEPS - told)
        told = done * count // STEPS

    for steps, exaggeration, momentum in PHASES:
        options = {"exaggeration": exaggeration, "momentum": momentum, "inplace": True}
        place.optimize(steps, callbacks=[tell], callbacks_every_iters=STEPS_TOLD, **options)
    return torch.from_numpy(place.view(type(start.numpy())).copy())


def _nearest(manifold: Manifold, points: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Distances (N, k) to the nearest others, nearest first, and which they are."""
    blocks: list[tuple[Tensor, Tensor]] = []
    for own in torch.arange(len(points)).split(ROWS):
        distances = manifold.distance(points[own], points)
        distances[torch.arange(len(own)), own] = torch.inf
        blocks.append(distances.topk(k, largest=False))
    distances, indices = (torch.cat(columns) for columns in zip(*blocks, strict=True))
    return distances.double(), indices
