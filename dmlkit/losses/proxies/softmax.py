"""The classes of a step under a softmax: denominators first, the gradient in the backward pass."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dmlkit.losses.proxies.classes import Block, Classes
from dmlkit.losses.proxies.gradient_sums import GradientSums, in_full_precision, refuse_gradient_of_gradient

Logits = Callable[[Block], Tensor]
"""Of a block: (B, w), differentiable."""


def others_and_own(classes: Classes, logits: Logits) -> tuple[Tensor, Tensor]:
    """log sum_{c != y_i} exp(z_ic) and z_iy_i of the logits z: a softmax loss is a function of the two.

    Args:
        classes: of the step.
        logits: of a block; may not depend on other blocks.

    Returns:
        (B,) and (B,); -inf where there is no other class, or where the logit is.
    """
    if torch.is_grad_enabled():
        return _OthersAndOwn.apply(classes, logits, classes.embeddings, classes.proxies, *classes.parameters)
    sums = _RowSums(classes)
    for block, _ in classes.blocks():
        sums.add(_Part.of(block, logits(block)))
    return sums.over_ranks()


class _Part(NamedTuple):
    """What the softmax takes from a block."""

    logits: Tensor  # (B, w), with its graph
    exponentials: Tensor  # exp(z - shift), 0 for the own class (B, w)
    shift: Tensor  # (B, 1)
    column: Tensor  # of the own class (B, 1)
    inside: Tensor  # (B, 1)

    @classmethod
    def of(cls, block: Block, logits: Tensor) -> "_Part":
        values = logits.detach()
        exponent = values.scatter(
            1, block.column, values.gather(1, block.column).masked_fill_(block.inside, -torch.inf)
        )
        shift = exponent.amax(1, keepdim=True).clamp_(min=torch.finfo(exponent.dtype).min)
        return cls(logits, exponent.sub_(shift).exp_(), shift, block.column, block.inside)


_Kept = tuple[_Part, int, tuple[Tensor, ...]]
"""With the first class of the block, and the leaves of its graph."""


class _RowSums:
    """The two results over the blocks so far, (B, 1) each."""

    def __init__(self, classes: Classes) -> None:
        self.shard = classes.shard
        self.others = self.own = classes.embeddings.new_full((len(classes.embeddings), 1), -torch.inf)

    def add(self, part: _Part) -> None:
        self.own = torch.where(part.inside, part.logits.detach().gather(1, part.column), self.own)
        self.others = torch.logaddexp(self.others, part.exponentials.sum(1, keepdim=True).log_().add_(part.shift))

    def over_ranks(self) -> tuple[Tensor, Tensor]:
        return self.shard.logsumexp(self.others[:, 0]), self.shard.maximum(self.own[:, 0].contiguous())


class _OthersAndOwn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, classes: Classes, logits: Logits, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        ctx.classes, ctx.logits = classes, logits
        sums, kept = _RowSums(classes), list[_Kept]()
        with in_full_precision(classes.proxies):
            for part, first, leaves in _parts(classes, logits):
                sums.add(part)
                kept += [(part, first, leaves)] if classes.keep else []
        ctx.kept = kept[::-1]
        others, own = sums.over_ranks()
        ctx.save_for_backward(*tensors, others)
        return others, own

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        refuse_gradient_of_gradient()
        grad_others, grad_own = (grad[:, None] for grad in grad_outputs)
        others = ctx.saved_tensors[-1].clamp(min=torch.finfo(grad_own.dtype).min)  # -inf where there is no other class
        gradients = GradientSums(ctx.classes.proxies, ctx.classes.shard)
        with in_full_precision(grad_own):
            for part, first, leaves in _popped(ctx.kept) if ctx.kept else _parts(ctx.classes, ctx.logits):
                gradient = part.exponentials.mul_(torch.exp(part.shift - others[:, None]) * grad_others)
                own = torch.where(part.inside, grad_own, gradient.gather(1, part.column))
                gradient = gradient.scatter_(1, part.column, own)
                options = {"allow_unused": True, "materialize_grads": True}
                gradients.add(first, torch.autograd.grad(part.logits, leaves, gradient, **options))
        return None, None, *gradients.over_ranks()


def _parts(classes: Classes, logits: Logits) -> Iterator[_Kept]:
    for block, leaves in classes.blocks(with_graph=True):
        yield _Part.of(block, logits(block)), block.first, leaves


def _popped(kept: list[_Kept]) -> Iterator[_Kept]:
    """What was kept, freed block by block."""
    while kept:
        yield kept.pop()
