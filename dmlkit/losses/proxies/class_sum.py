"""The walk of a loss that is a sum of terms of one class each: value and gradient in one pass over the classes."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dmlkit.losses.proxies.class_chunks import (
    GradientSums,
    Score,
    Walk,
    chunk_with_graph,
    refuse_gradient_of_gradient,
    similarities,
)


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
        return walk.shard.sum(torch.stack(terms).sum())
    return _SumOverClasses.apply(walk, score, embeddings, proxies, *walk.parameters)


class _SumOverClasses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, walk: Walk, score: Score, *tensors: Tensor) -> Tensor:
        ctx.walk, ctx.score, ctx.needed = walk, score, ctx.needs_input_grad[2:]
        ctx.save_for_backward(*tensors)
        value, ctx.gradients = _sum_and_gradients(walk, score, tensors, ctx.needed)
        return value

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        refuse_gradient_of_gradient()
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
    gradients = GradientSums(proxies, needed)
    rows = embeddings.detach().requires_grad_(needed[0])
    value = embeddings.new_zeros(())
    for first in range(0, len(proxies), walk.chunk_size):
        leaf, similarity = chunk_with_graph(walk, rows, proxies, first, needed)
        term, gradient = score(similarity.detach(), first)
        value += term
        gradients.add(similarity, gradient, (rows, leaf, *parameters), first)
    return walk.shard.sum(value), gradients.over_ranks(walk.shard)
