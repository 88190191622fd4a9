"""The walk of a loss with a softmax over the classes of each row: denominators first, then the gradient."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dmlkit.losses.proxies.class_chunks import (
    GradientSums,
    Walk,
    chunk_with_graph,
    own_columns,
    refuse_gradient_of_gradient,
)
from dmlkit.losses.proxies.proxy_loss import Selection


def logsumexp_over_classes(selection: Selection, embeddings: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """log sum_{c != y_i} exp(scale s(x_i, c)) and s(x_i, y_i): a softmax loss is a function of the two.

    Args:
        selection: walk, proxies (C, ...) and labels (B,).
        embeddings: (B, D).
        scale: inverse temperature > 0.

    Returns:
        (B,) and (B,); -inf where there is no other class, or where the similarity is.
    """
    walk, proxies = selection.walk, selection.proxies
    rows = _Rows(walk, selection.labels, scale)
    if not torch.is_grad_enabled():
        return rows.others_and_own(embeddings, proxies, (False, False), kept=None)
    return _LogSumExpOverClasses.apply(rows, embeddings, proxies, *walk.parameters)


class _Chunk(NamedTuple):
    """What the backward pass needs of w classes."""

    leaves: tuple[Tensor, Tensor]  # embeddings and the chunk's proxies
    similarity: Tensor  # (B, w), with its graph
    exponentials: Tensor  # exp(scale s - shift), 0 for the own class (B, w)
    shift: Tensor  # (B, 1)
    column: Tensor  # of the own class, see own_columns (B, 1)
    inside: Tensor  # (B, 1)


class _Rows(NamedTuple):
    walk: Walk
    labels: Tensor
    scale: float

    def chunk(self, embeddings: Tensor, proxies: Tensor, first: int, needed: Sequence[bool]) -> _Chunk:
        leaf, graph = chunk_with_graph(self.walk, embeddings, proxies, first, needed)
        similarity = graph.detach()
        column, inside = own_columns(self.labels, first, similarity.shape[1])
        exponent = similarity * self.scale
        exponent.scatter_(1, column, torch.where(inside, -torch.inf, exponent.gather(1, column)))
        shift = exponent.amax(1, keepdim=True).clamp_(min=torch.finfo(exponent.dtype).min)
        return _Chunk((embeddings, leaf), graph, exponent.sub_(shift).exp_(), shift, column, inside)

    def others_and_own(
        self, embeddings: Tensor, proxies: Tensor, needed: Sequence[bool], kept: list[_Chunk | None] | None
    ) -> tuple[Tensor, Tensor]:
        """The two results (B,) each; the chunks go into ``kept``."""
        leaf_rows = embeddings.detach().requires_grad_(needed[0])
        others = own = embeddings.new_full((len(embeddings), 1), -torch.inf)
        for first in range(0, len(proxies), self.walk.chunk_size):
            chunk = self.chunk(leaf_rows, proxies, first, needed)
            own = torch.where(chunk.inside, chunk.similarity.detach().gather(1, chunk.column), own)
            others = torch.logaddexp(others, chunk.exponentials.sum(1, keepdim=True).log_().add_(chunk.shift))
            if kept is not None:
                kept.append(chunk)
        shard = self.walk.shard
        return shard.logsumexp(others[:, 0]), shard.maximum(own[:, 0].contiguous())


class _LogSumExpOverClasses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: _Rows, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        ctx.rows, ctx.needed, ctx.kept = rows, ctx.needs_input_grad[1:], []
        kept = ctx.kept if rows.walk.keep else None
        others, own = rows.others_and_own(tensors[0], tensors[1], ctx.needed, kept)
        ctx.save_for_backward(*tensors, others)
        return others, own

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        refuse_gradient_of_gradient()
        grad_others, grad_own = grad_outputs
        rows, (*tensors, others) = ctx.rows, ctx.saved_tensors
        embeddings, proxies, *parameters = tensors
        others = others.clamp(min=torch.finfo(others.dtype).min)  # -inf where there is no other class
        gradients = GradientSums(proxies, ctx.needed)
        kept, ctx.kept = ctx.kept, []
        leaf_rows = embeddings.detach().requires_grad_(ctx.needed[0])
        for index, first in enumerate(range(0, len(proxies), rows.walk.chunk_size)):
            if kept:
                chunk, kept[index] = kept[index], None  # freed chunk by chunk
            else:
                chunk = rows.chunk(leaf_rows, proxies, first, ctx.needed)
            factor = torch.exp(chunk.shift - others[:, None]) * (rows.scale * grad_others[:, None])
            gradient = chunk.exponentials.mul_(factor)
            own = torch.where(chunk.inside, grad_own[:, None], gradient.gather(1, chunk.column))
            gradient.scatter_(1, chunk.column, own)
            gradients.add(chunk.similarity, gradient, (*chunk.leaves, *parameters), first)
        return (None, *gradients.over_ranks(rows.walk.shard))
