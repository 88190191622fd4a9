"""Proxy losses a chunk of classes at a time: the value and gradient of the dense form, without its B x C matrices.

Two walks over the proxies, for two shapes of loss:

- `sum_over_classes` for a sum of terms of one class each (Proxy-Anchor, MPA, Proxy-ISA): it takes the gradient of a
  chunk at once, in the forward pass, and drops the chunk;
- `logsumexp_over_classes` for a softmax over the classes of each row (ProxyNCA, SoftTriple, CosFace, ArcFace,
  ProxyGML): the denominators first, the gradient in the backward pass, from kept or recomputed similarities.

Both take the gradient with respect to a similarity in closed form and leave the rest to autograd, so they work for
every manifold, learnable ones included. Memory is O(B chunk + C d).
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

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

    ``keep`` lets similarities wait for the backward pass where a loss would have to compute them twice.
    """

    similarity: Similarity
    parameters: tuple[Tensor, ...]
    chunk_size: int
    keep: bool = False


def similarity_to_classes(manifold: Manifold, pool: Pool | None = None) -> Similarity:
    """The manifold's similarity to proxies (C, d), or to (C, K, d) with a ``pool`` over the K of a class."""

    def similarity(embeddings: Tensor, proxies: Tensor, first: int) -> Tensor:
        points = manifold.proxy_points(proxies)
        if pool is None:
            return manifold.similarity(embeddings, points)
        # Proxies of equal rank side by side: what follows runs along the classes, not along a handful of proxies.
        by_rank = manifold.similarity(embeddings, points.transpose(0, 1).flatten(0, 1))
        return pool(by_rank.view(len(embeddings), -1, len(proxies)), first)

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


def sum_over_classes(walk: Walk, score: Score, embeddings: Tensor, proxies: Tensor) -> Tensor:
    """The sum of ``score`` over chunks of classes; its gradient is taken at once, chunk by chunk.

    Args:
        walk: similarity, its learnable tensors and the chunk size.
        score: value and gradient of a chunk with respect to its similarities; may not depend on other chunks.
        embeddings: (B, D).
        proxies: (C, ...).
    """
    if not torch.is_grad_enabled():
        terms = [score(similarity, first)[0] for first, similarity in similarities(walk, embeddings, proxies)]
        return torch.stack(terms).sum()
    return _SumOverClasses.apply(walk, score, embeddings, proxies, *walk.parameters)


def logsumexp_over_classes(
    walk: Walk, embeddings: Tensor, labels: Tensor, proxies: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """log sum_{c != y_i} exp(scale s(x_i, c)) and s(x_i, y_i): a softmax loss is a function of the two.

    Args:
        walk: similarity, its learnable tensors and the chunk size.
        embeddings: (B, D).
        labels: (B,).
        proxies: (C, ...).
        scale: inverse temperature > 0.

    Returns:
        (B,) and (B,); -inf where there is no other class, or where the similarity is.
    """
    rows = _Rows(walk, labels, scale, walk.keep and torch.is_grad_enabled())
    return _LogSumExpOverClasses.apply(rows, embeddings, proxies, *walk.parameters)


def _with_graph(walk: Walk, embeddings: Tensor, proxies: Tensor, first: int, learnable: bool) -> tuple[Tensor, Tensor]:
    """The proxies of a chunk as a leaf, and the similarity (B, w) with its graph down to the leaves."""
    leaf = proxies[first : first + walk.chunk_size].detach().requires_grad_(learnable)
    with torch.enable_grad():
        return leaf, walk.similarity(embeddings, leaf, first)


class _Gradients:
    """Adds up the gradients of the chunks: (B, D) for embeddings, (C, ...) for proxies, one for each parameter."""

    def __init__(self, tensors: Sequence[Tensor], needed: Sequence[bool]) -> None:
        proxies = tensors[1]
        self.needed = needed
        self.sums = [torch.zeros_like(tensor) if need else None for tensor, need in zip(tensors, needed, strict=True)]
        self.sums[1] = torch.empty_like(proxies) if needed[1] else None  # every row is written once

    def add(self, output: Tensor, gradient: Tensor, leaves: Sequence[Tensor], first: int) -> None:
        chosen = [(index, leaf) for index, leaf in enumerate(leaves) if self.needed[index]]
        if not chosen:
            return
        parts = torch.autograd.grad(output, [leaf for _, leaf in chosen], gradient, allow_unused=True)
        for (index, leaf), part in zip(chosen, parts, strict=True):
            total = self.sums[index]
            assert total is not None
            if index == 1:
                rows = total[first : first + len(leaf)]
                rows.zero_() if part is None else rows.copy_(part)
            elif part is not None:
                total += part


class _SumOverClasses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, walk: Walk, score: Score, *tensors: Tensor) -> Tensor:
        ctx.walk, ctx.score, ctx.needed = walk, score, ctx.needs_input_grad[2:]
        ctx.save_for_backward(*tensors)
        value, ctx.gradients = _sum_and_gradients(walk, score, tensors, ctx.needed)
        return value

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grad_outputs
        gradients, ctx.gradients = ctx.gradients, None  # let go, so that autograd need not copy C x d numbers
        if gradients is None:  # a second backward pass through a retained graph
            gradients = _sum_and_gradients(ctx.walk, ctx.score, ctx.saved_tensors, ctx.needed)[1]
        if not (grad.is_cpu and grad.item() == 1):  # looking at it on a GPU would stall the step
            for total in gradients:
                if total is not None:
                    total.mul_(grad)
        return (None, None, *gradients)


def _sum_and_gradients(
    walk: Walk, score: Score, tensors: Sequence[Tensor], needed: Sequence[bool]
) -> tuple[Tensor, list[Tensor | None]]:
    embeddings, proxies, *parameters = tensors
    gradients = _Gradients(tensors, needed)
    rows = embeddings.detach().requires_grad_(needed[0])
    value = embeddings.new_zeros(())
    for first in range(0, len(proxies), walk.chunk_size):
        leaf, similarity = _with_graph(walk, rows, proxies, first, needed[1])
        term, gradient = score(similarity.detach(), first)
        value += term
        gradients.add(similarity, gradient, (rows, leaf, *parameters), first)
    return value, gradients.sums


class _Rows(NamedTuple):
    walk: Walk
    labels: Tensor
    scale: float
    keep: bool

    def exponentials(self, similarity: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """exp(scale s - shift) with 0 for the own class (B, w), and the shift (B, 1)."""
        column, inside = own_columns(self.labels, first, similarity.shape[1])
        exponent = similarity * self.scale
        exponent.scatter_(1, column, torch.where(inside, -torch.inf, exponent.gather(1, column)))
        shift = exponent.amax(1, keepdim=True).clamp_(min=torch.finfo(exponent.dtype).min)
        return exponent.sub_(shift).exp_(), shift


class _LogSumExpOverClasses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: _Rows, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        embeddings, proxies = tensors[:2]
        ctx.rows, ctx.needed, ctx.kept = rows, ctx.needs_input_grad[1:], []
        leaf_rows = embeddings.detach().requires_grad_(ctx.needed[0])
        others = embeddings.new_full((len(embeddings), 1), -torch.inf)
        own = torch.zeros_like(others)
        for first in range(0, len(proxies), rows.walk.chunk_size):
            leaf, graph = _with_graph(rows.walk, leaf_rows, proxies, first, ctx.needed[1])
            similarity = graph.detach()
            exponentials, shift = rows.exponentials(similarity, first)
            column, inside = own_columns(rows.labels, first, similarity.shape[1])
            own = torch.where(inside, similarity.gather(1, column), own)
            others = torch.logaddexp(others, exponentials.sum(1, keepdim=True).log_().add_(shift))
            if rows.keep:
                ctx.kept.append((leaf_rows, leaf, graph, exponentials, shift))
        ctx.save_for_backward(*tensors, others)
        return others[:, 0], own[:, 0]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        grad_others, grad_own = grad_outputs
        rows, (*tensors, others) = ctx.rows, ctx.saved_tensors
        embeddings, proxies, *parameters = tensors
        others = others.clamp(min=torch.finfo(others.dtype).min)  # -inf where there is no other class
        gradients = _Gradients(tensors, ctx.needed)
        kept, ctx.kept = ctx.kept, []
        leaf_rows = embeddings.detach().requires_grad_(ctx.needed[0])
        for index, first in enumerate(range(0, len(proxies), rows.walk.chunk_size)):
            if kept:
                leaf_rows, leaf, graph, weights, shift = kept[index]
                kept[index] = None  # freed chunk by chunk
            else:
                leaf, graph = _with_graph(rows.walk, leaf_rows, proxies, first, ctx.needed[1])
                weights, shift = rows.exponentials(graph.detach(), first)
            weights.mul_(torch.exp(shift - others) * (rows.scale * grad_others[:, None]))
            column, inside = own_columns(rows.labels, first, weights.shape[1])
            weights.scatter_(1, column, torch.where(inside, grad_own[:, None], weights.gather(1, column)))
            gradients.add(graph, weights, (leaf_rows, leaf, *parameters), first)
        return (None, *gradients.sums)
