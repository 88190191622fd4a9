"""Proxy losses a chunk of classes at a time: the value and gradient of the dense form, without its B x C matrices.

Two walks over the proxies, for two shapes of loss:

- `class_sum.sum_over_classes` for a sum of terms of one class each (Proxy-Anchor, MPA, Proxy-ISA): it takes the
  gradient of a chunk at once, in the forward pass, and drops the chunk;
- `class_logsumexp.logsumexp_over_classes` for a softmax over the classes of each row (ProxyNCA, SoftTriple, CosFace,
  ArcFace, ProxyGML): the denominators first, the gradient in the backward pass, from kept or recomputed similarities.

Both take the gradient with respect to a similarity in closed form and leave the rest to autograd, so they work for
every manifold, learnable ones included. Memory is O(B chunk + C d).
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dmlkit.distributed.class_shard import ClassShard
from dmlkit.manifolds.base import Manifold

Similarity = Callable[[Tensor, Tensor, int], Tensor]
"""Of embeddings (B, D), the proxies of w classes (w, ...) and the first of these classes: (B, w), differentiable."""
Pool = Callable[[Tensor, int], Tensor]
"""From the similarities (B, K, w) to the K proxies of w classes, and the first of these: (B, w), differentiable."""
Score = Callable[[Tensor, int], tuple[Tensor, Tensor]]
"""Of similarities (B, w) and the first of the w classes: a term of the loss, and its gradient (B, w)."""

# Measured at B=180, C=11 318, d=512: chunks of 2^20 floats stay in the cache of a CPU (93 ms a step against 129 ms
# in one piece); a GPU wants large products.
CHUNK_NUMBERS = {"cpu": 2**20, "cuda": 2**26}
KEPT_NUMBERS = 2**26  # similarities and proxies that may wait for the backward pass: 256 MiB of float32


class Walk(NamedTuple):
    """How to go over the classes: what to compute of a chunk, with which learnable tensors, how many at a time.

    ``keep`` lets similarities wait for the backward pass where a loss would have to compute them twice; ``shard``
    says where the other classes are, if other ranks compute them.
    """

    similarity: Similarity
    parameters: tuple[Tensor, ...]
    chunk_size: int
    keep: bool = False
    shard: ClassShard = ClassShard()


def similarity_to_classes(manifold: Manifold, pool: Pool | None = None) -> Similarity:
    """The manifold's similarity to proxies (C, d), or to (C, K, d) with a ``pool`` over the K of a class."""

    def similarity(embeddings: Tensor, proxies: Tensor, first: int) -> Tensor:
        points = manifold.proxy_points(proxies)
        if pool is None:
            return manifold.similarity(embeddings, points)
        by_class = manifold.similarity(embeddings, points.flatten(0, 1)).unflatten(1, proxies.shape[:2])  # (B, w, K)
        # What follows runs along the classes, not along a handful of proxies.
        return pool(by_class.transpose(1, 2).contiguous(), first)

    return similarity


def plan_walk(
    manifold: Manifold, embeddings: Tensor, proxies: Tensor, chunk_size: int | None, pool: Pool | None = None
) -> Walk:
    """The walk over ``proxies`` by the manifold's similarity.

    Raises:
        ValueError: embeddings and proxies differ in dtype.
    """
    if embeddings.dtype != proxies.dtype:
        raise ValueError(
            f"expected embeddings of the proxies' dtype {proxies.dtype}, got {embeddings.dtype}; "
            "convert the loss or the embeddings"
        )
    size = chunk_size or automatic_chunk_size(embeddings, proxies)
    keep = not chunk_size and 2 * len(embeddings) * proxies[..., 0].numel() + proxies.numel() <= KEPT_NUMBERS
    return Walk(similarity_to_classes(manifold, pool), tuple(manifold.parameters()), size, keep)


def automatic_chunk_size(embeddings: Tensor, proxies: Tensor) -> int:
    """How many classes to take at a time, so that neither similarities nor proxies leave the cache."""
    per_class = proxies[0].numel() // proxies.shape[-1] * max(len(embeddings), proxies.shape[-1])
    return max(64, CHUNK_NUMBERS.get(embeddings.device.type, 2**20) // per_class)


def own_columns(labels: Tensor, first: int, width: int) -> tuple[Tensor, Tensor]:
    """Where the own class of each row is among the classes first..first+width-1, without a device sync.

    Returns:
        Columns (B, 1), clamped into the chunk, and whether the own class is in the chunk at all (B, 1).
    """
    column = (labels - first)[:, None]
    return column.clamp(0, width - 1), (column >= 0) & (column < width)


def similarities(walk: Walk, embeddings: Tensor, proxies: Tensor) -> Iterator[tuple[int, Tensor]]:
    """First class and similarity (B, w) of each chunk, without gradient."""
    for first in range(0, len(proxies), walk.chunk_size):
        with torch.no_grad():
            similarity = walk.similarity(embeddings, proxies[first : first + walk.chunk_size], first)
        yield first, similarity


def chunk_with_graph(
    walk: Walk, embeddings: Tensor, proxies: Tensor, first: int, needed: Sequence[bool]
) -> tuple[Tensor, Tensor]:
    """The proxies of a chunk as a leaf, and the similarity (B, w) with its graph down to the leaves.

    ``needed`` says of embeddings, proxies and each parameter whether its gradient is wanted.
    """
    leaf = proxies[first : first + walk.chunk_size].detach().requires_grad_(needed[1])
    with torch.set_grad_enabled(any(needed)), torch.autocast(embeddings.device.type, enabled=False):
        return leaf, walk.similarity(embeddings, leaf, first)


def refuse_gradient_of_gradient() -> None:
    """To be called in a backward pass that is in closed form.

    Raises:
        RuntimeError: it runs with ``create_graph=True``, and would silently count as a constant.
    """
    if torch.is_grad_enabled():
        raise RuntimeError("the gradient of a proxy loss has no gradient of its own; use create_graph=False")


class GradientSums:
    """Adds up the gradients of the chunks: (B, D) for embeddings, (C, ...) for proxies, one for each parameter.

    Args:
        proxies: (C, ...).
        needed: for embeddings, proxies and each parameter, whether its gradient is wanted.
    """

    def __init__(self, proxies: Tensor, needed: Sequence[bool]) -> None:
        self.proxies, self.needed = proxies, needed
        self.sums: list[Tensor | None] = [None] * len(needed)

    def add(self, output: Tensor, gradient: Tensor, leaves: Sequence[Tensor], first: int) -> None:
        """Pass ``gradient`` on from ``output`` to its leaves: embeddings, proxies from class ``first``, parameters."""
        chosen = [index for index, need in enumerate(self.needed) if need]
        if not chosen:
            return
        wanted = [leaves[index] for index in chosen]
        with torch.autocast(output.device.type, enabled=False):  # a backward pass may be called inside one
            parts = torch.autograd.grad(output, wanted, gradient, allow_unused=True, materialize_grads=True)
        for index, part in zip(chosen, parts, strict=True):
            total = self.sums[index]
            if index == 1 and len(part) < len(self.proxies):
                total = torch.empty_like(self.proxies) if total is None else total  # every row is written once
                total[first : first + len(part)] = part
            else:
                total = part if total is None else total.add_(part)
            self.sums[index] = total

    def over_ranks(self, shard: ClassShard) -> list[Tensor | None]:
        """The sums; those of embeddings and parameters, to which every rank's classes contribute, over all ranks."""
        return [
            total if index == 1 or total is None else shard.sum(total.contiguous())
            for index, total in enumerate(self.sums)
        ]
