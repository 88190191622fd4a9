"""Several proxies (centers) a class: one similarity from K of them, and a pull between them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dmlkit.losses.proxies.classes import Block, Classes, sum_over_classes
from dmlkit.losses.proxies.similarity import by_autograd
from dmlkit.manifolds.base import Manifold

CenterPooling = Literal["softmax", "max", "mean"]
# Distances within groups are the diagonal blocks of those of this many points: few enough that the rest of the square
# costs little, enough that the calls do.
BLOCK_POINTS = {"cpu": 64, "cuda": 2048}


def pool_centers(kind: CenterPooling, gamma: float) -> Callable[[Tensor], Tensor]:
    r"""The similarity of a row to a class with K proxies, from the similarities s_k to each.

    ``softmax`` :math:`\sum_k \frac{e^{s_k / \gamma}}{\sum_l e^{s_l / \gamma}} s_k`, ``max`` or ``mean``.

    Example:
        >>> similarity = torch.tensor([0.2, 0.6]).view(1, 2, 1)  # one row, K = 2, one class
        >>> [round(pool_centers(kind, 0.1)(similarity).item(), 3) for kind in ("softmax", "max", "mean")]
        [0.593, 0.6, 0.4]
    """

    def pool(similarity: Tensor) -> Tensor:  # (B, K, w) -> (B, w)
        match kind:
            case "softmax":
                return _SoftPool.apply(similarity, gamma) if similarity.shape[1] > 1 else similarity[:, 0]
            case "max":
                return similarity.amax(1)
            case "mean":
                return similarity.mean(1)

    return pool


class _SoftPool(torch.autograd.Function):
    """With t = sum_k q_k s_k the gradient is q_k (1 + (s_k - t) / gamma), in two passes over the similarities.

    Nothing divides exp(s_k / gamma) by its sum over k: what is made of all k is divided, K times fewer numbers.
    """

    @staticmethod
    def forward(ctx: Any, similarity: Tensor, gamma: float) -> Tensor:
        exponentials = similarity * (1 / gamma)
        exponentials.sub_(exponentials.amax(1, keepdim=True)).exp_()
        total = exponentials.sum(1)
        pooled = (exponentials * similarity).sum(1).div_(total)
        ctx.gamma = gamma
        ctx.save_for_backward(similarity, exponentials, total, pooled)
        return pooled

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (grad,) = grad_outputs
        similarity, exponentials, total, pooled = ctx.saved_tensors
        grad = grad / total
        slope = grad / ctx.gamma
        offset = torch.addcmul(grad, slope, pooled, value=-1)
        return torch.addcmul(offset[:, None], slope[:, None], similarity).mul_(exponentials), None


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
