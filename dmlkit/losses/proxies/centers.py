"""Several proxies (centers) a class: one similarity from K of them, and a pull between them."""

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from dmlkit.losses.proxies.classes import Block, Classes, sum_over_classes
from dmlkit.losses.proxies.similarity import Pool, Pooled, by_autograd
from dmlkit.manifolds.base import Manifold

CenterPooling = Literal["softmax", "max", "mean"]
# Distances within groups are the diagonal blocks of those of this many points: few enough that the rest of the square
# costs little, enough that the calls do.
BLOCK_POINTS = {"cpu": 64, "cuda": 2048}


def pool_centers(kind: CenterPooling, gamma: float) -> Pool:
    r"""The similarity of a row to a class with K proxies, from the similarities s_k to each.

    ``softmax`` :math:`t = \sum_k q_k s_k` with :math:`q_k = e^{s_k / \gamma} / \sum_l e^{s_l / \gamma}`, whose gradient
    is :math:`q_k (1 + (s_k - t) / \gamma)`; ``max``, whose gradient goes to equal ones in equal parts; or ``mean``.

    Args:
        kind: of these.
        gamma: > 0, temperature of ``softmax``, in similarity units.

    Example:
        >>> similarity = torch.tensor([0.2, 0.6]).view(1, 2, 1)  # one row, K = 2, one class
        >>> [round(pool_centers(kind, 0.1)(similarity)[0].item(), 3) for kind in ("softmax", "max", "mean")]
        [0.593, 0.6, 0.4]
    """

    def pool(similarity: Tensor) -> Pooled:
        match kind if similarity.shape[1] > 1 else "mean":  # of one all are the same, and this one is exact
            case "softmax":
                return _soft_pool(similarity, gamma)
            case "max":
                return _max_pool(similarity)
            case "mean":
                return _mean_pool(similarity)

    return pool


def _soft_pool(similarity: Tensor, gamma: float) -> Pooled:
    exponentials = similarity * (1 / gamma)
    exponentials.sub_(exponentials.amax(1, keepdim=True)).exp_()
    total = exponentials.sum(1)  # divides what is made of all K: K times fewer numbers than the exponentials
    pooled = (exponentials * similarity).sum(1).div_(total)

    def pull_back(gradient: Tensor) -> Tensor:
        gradient = gradient / total
        slope = gradient / gamma
        offset = torch.addcmul(gradient, slope, pooled, value=-1)
        return torch.addcmul(offset[:, None], slope[:, None], similarity).mul_(exponentials)

    return Pooled(pooled, pull_back)


def _max_pool(similarity: Tensor) -> Pooled:
    largest = similarity.amax(1)

    def pull_back(gradient: Tensor) -> Tensor:
        is_largest = similarity == largest[:, None]
        return is_largest * (gradient / is_largest.sum(1))[:, None]

    return Pooled(largest, pull_back)


def _mean_pool(similarity: Tensor) -> Pooled:
    def pull_back(gradient: Tensor) -> Tensor:
        return (gradient / similarity.shape[1])[:, None].expand_as(similarity)

    return Pooled(similarity.mean(1), pull_back)


def mean_center_distance(manifold: Manifold, classes: Classes) -> Tensor:
    r"""Half the mean distance between two proxies of a class: MPA eq. 3, which is SoftTriple's regularizer.

    .. math:: \frac{1}{C K (K - 1)} \sum_c \sum_{s < t} d(w_{cs}, w_{ct})

    Args:
        manifold: the geometry whose distance d is.
        classes: of a step, with proxies (n, K, d), K > 1.
    """

    def nothing(_: Tensor, proxies: Tensor) -> Tensor:
        return proxies.new_empty(0)

    within = replace(classes, embeddings=classes.proxies.new_empty(0), measure=by_autograd(nothing))
    return sum_over_classes(within, lambda block: center_distances(manifold, block))


def center_distances(manifold: Manifold, block: Block) -> Tensor:
    """The terms (w,) of the classes of a block in `mean_center_distance`.

    On the sphere d is sqrt(2 - 2 <w, w'>), whose gradient is infinite at w = w'; the manifold's is 0 there.
    """
    per_class = block.proxies.shape[1]
    factor = 0.5 / (block.classes.total * per_class * (per_class - 1))  # each pair is met twice
    return distances_within(manifold, manifold.proxy_points(block.proxies)).sum((1, 2)) * factor


def distances_within(manifold: Manifold, points: Tensor) -> Tensor:
    """The distances (w, K, K) between the K points of each of w groups (w, K, D).

    Example:
        >>> from dmlkit.manifolds import Euclidean
        >>> distances_within(Euclidean(1), torch.tensor([[[0.0], [3.0]]])).tolist()
        [[[0.0, 3.0], [3.0, 0.0]]]
    """
    if manifold.takes_stacks:
        return manifold.distance(points, points)
    per_group, found = points.shape[1], list[Tensor]()
    for some in points.split(max(1, BLOCK_POINTS.get(points.device.type, 64) // per_group)):
        flat = some.flatten(0, 1)
        square = manifold.distance(flat, flat).unflatten(1, (-1, per_group)).unflatten(0, (-1, per_group))
        found.append(square.diagonal(dim1=0, dim2=2).permute(2, 0, 1))
    return torch.cat(found)
