"""Several proxies (centers) per class: their similarities pooled to one, and a term that pulls them together."""

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from dmlkit.losses.proxies.classes import Block, Classes, sum_over_classes
from dmlkit.losses.proxies.similarity import by_autograd
from dmlkit.manifolds.base import Manifold

CenterPooling = Literal["softmax", "max", "mean"]
# Distances within groups are the diagonal blocks of the distances between this many points: few enough that the rest
# of the square costs little, but enough that the number of calls stays small.
BLOCK_POINTS = {"cpu": 64, "cuda": 2048}


def pool_centers(similarity: Tensor, kind: CenterPooling, gamma: float = 1.0) -> Tensor:
    r"""Pool the similarities s_k (B, K, w) of a row to the K proxies of a class to one (B, w).

    ``softmax``: :math:`\sum_k q_k s_k` with :math:`q_k = e^{s_k / \gamma} / \sum_l e^{s_l / \gamma}`; ``max``, whose
    gradient is split equally between ties; or ``mean``.

    Args:
        gamma: temperature (> 0) of ``softmax``, in similarity units.

    Example:
        >>> similarity = torch.tensor([0.2, 0.6]).view(1, 2, 1)  # one row, K = 2, one class
        >>> [round(pool_centers(similarity, kind, 0.1).item(), 3) for kind in ("softmax", "max", "mean")]
        [0.593, 0.6, 0.4]
    """

    match kind if similarity.shape[1] > 1 else "mean":  # all are equal for K = 1, and the mean is exact
        case "softmax":
            return ((similarity / gamma).softmax(1) * similarity).sum(1)
        case "max":
            return similarity.amax(1)
        case "mean":
            return similarity.mean(1)


def center_regularizer(manifold: Manifold, block: Block, weight: float) -> Tensor:
    r"""Compute a block's part of half the mean distance between two of K > 1 proxies of a class: MPA eq. 3, SoftTriple.

    .. math:: \frac{\tau}{C K (K - 1)} \sum_c \sum_{s < t} d(w_{cs}, w_{ct})

    On the sphere d is sqrt(2 - 2 <w, w'>), whose gradient is infinite at w = w'; `Manifold.distance` returns 0 there.

    Args:
        weight: tau, >= 0.

    Returns:
        A scalar with a graph; the terms of all blocks add up to the regularizer.
    """
    per_class = block.proxies.shape[1]
    factor = 0.5 * weight / (block.classes.total * per_class * (per_class - 1))  # each pair occurs twice
    return distances_within(manifold, manifold.proxy_points(block.proxies)).sum() * factor


def over_all_centers(manifold: Manifold, classes: Classes, weight: float) -> Tensor:
    """Return the sum, a scalar, of `center_regularizer` over all blocks, for a loss that is no sum over its classes."""

    def nothing(_: Tensor, proxies: Tensor) -> Tensor:
        return proxies.new_empty(0)

    within = replace(classes, embeddings=classes.proxies.new_empty(0), measure=by_autograd(nothing))
    return sum_over_classes(within, lambda block: center_regularizer(manifold, block, weight))


def distances_within(manifold: Manifold, points: Tensor) -> Tensor:
    """Compute the distances (w, K, K) between the K points of each of w groups (w, K, D)."""
    if manifold.takes_stacks:
        return manifold.distance(points, points)
    per_group, distances = points.shape[1], list[Tensor]()
    for groups in points.split(max(1, BLOCK_POINTS.get(points.device.type, 64) // per_group)):
        flat = groups.flatten(0, 1)
        square = manifold.distance(flat, flat).unflatten(1, (-1, per_group)).unflatten(0, (-1, per_group))
        distances.append(square.diagonal(dim1=0, dim2=2).permute(2, 0, 1))
    return torch.cat(distances)
