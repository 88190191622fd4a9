"""The walk of a loss with a softmax over the classes of each row: denominators first, then the gradient."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dmlkit.losses.class_chunks import GradientSums, Walk, chunk_with_graph, own_columns


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
            leaf, graph = chunk_with_graph(rows.walk, leaf_rows, proxies, first, ctx.needed[1])
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
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        grad_others, grad_own = grad_outputs
        rows, (*tensors, others) = ctx.rows, ctx.saved_tensors
        embeddings, proxies, *parameters = tensors
        others = others.clamp(min=torch.finfo(others.dtype).min)  # -inf where there is no other class
        gradients = GradientSums(proxies, ctx.needed)
        kept, ctx.kept = ctx.kept, []
        leaf_rows = embeddings.detach().requires_grad_(ctx.needed[0])
        for index, first in enumerate(range(0, len(proxies), rows.walk.chunk_size)):
            if kept:
                leaf_rows, leaf, graph, weights, shift = kept[index]
                kept[index] = None  # freed chunk by chunk
            else:
                leaf, graph = chunk_with_graph(rows.walk, leaf_rows, proxies, first, ctx.needed[1])
                weights, shift = rows.exponentials(graph.detach(), first)
            weights.mul_(torch.exp(shift - others) * (rows.scale * grad_others[:, None]))
            column, inside = own_columns(rows.labels, first, weights.shape[1])
            weights.scatter_(1, column, torch.where(inside, grad_own[:, None], weights.gather(1, column)))
            gradients.add(graph, weights, (leaf_rows, leaf, *parameters), first)
        return (None, *gradients.sums)
