"""Softmax over the classes of a step: denominators in the forward pass, the gradient in the backward pass."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

from dmlkit.component import option
from dmlkit.losses.proxies.classes import Block, Classes, GradientSums, refuse_gradient_of_gradient
from dmlkit.losses.proxies.proxy_loss import ProxyLoss
from dmlkit.manifolds.products import without_autocast

Logits = Callable[[Block], Tensor]
"""A differentiable function that returns the logits (B, w) of a block."""


class RowLosses(NamedTuple):
    """The loss of each row of a batch, with its derivatives, so that autograd is not needed; (B,) each."""

    values: Tensor
    of_others: Tensor  # derivative with respect to log sum_{c != y} exp(z_c)
    of_own: Tensor  # derivative with respect to z_y


RowLoss = Callable[[Tensor, Tensor], RowLosses]
"""A function of log sum_{c != y_i} exp(z_ic) and z_iy_i, (B,) each. The first is -inf if a row has no other class; the
second may be -inf."""


def cross_entropy(others: Tensor, own_logits: Tensor) -> RowLosses:
    """Compute log(1 + exp(others - own_logits)) as a `RowLoss`."""
    gap = others - own_logits
    slope = gap.sigmoid()
    return RowLosses(softplus(gap), slope, -slope)


class SoftmaxLoss(ProxyLoss):
    """A loss over proxies that depends on a softmax of ``logit_scale * logits`` over the classes of each row."""

    logit_scale: float = option(default=1.0, init=False)
    """Inverse temperature, > 0."""

    def logits(self, block: Block) -> Tensor:
        """Compute the unscaled logits (B, w) of a block; here the similarities."""
        return block.similarity

    def row_losses(self, others: Tensor, own_logits: Tensor) -> RowLosses:
        """Apply a `RowLoss` to log sum_{c != y} exp(z_c) and z_y, (B,) each; here cross-entropy."""
        return cross_entropy(others, own_logits)

    def over(self, classes: Classes) -> Tensor:
        return mean_softmax_loss(classes, self.row_losses, self.logits, self.logit_scale)


def mean_softmax_loss(classes: Classes, row_loss: RowLoss, logits: Logits, scale: float = 1.0) -> Tensor:
    """Compute the mean of a loss of the rows, which depends on the classes only by the two numbers of a softmax.

    Args:
        row_loss: a function of the logits z times the scale a.
        logits: z of a block; may not depend on other blocks.
        scale: a > 0; saves two passes over a block compared with scaling inside ``logits``.

    Returns:
        A scalar, differentiable once.
    """
    if torch.is_grad_enabled():
        tensors = classes.embeddings, classes.proxies, *classes.parameters
        return _MeanLoss.apply(classes, row_loss, logits, scale, *tensors)
    sums = _RowSums(classes)
    for block in classes.blocks():
        sums.add(_BlockSoftmax.of(block, logits(block), scale))
    return row_loss(*sums.over_ranks()).values.mean()


class _BlockSoftmax(NamedTuple):
    """The softmax of one block."""

    block: Block
    logits: Tensor  # (B, w), with graph
    own: Tensor  # scaled logit of the own class, (B, 1)
    exponentials: Tensor  # exp(scaled logit - shift), 0 for the own class, (B, w)
    shift: Tensor  # (B, 1)

    @classmethod
    def of(cls, block: Block, logits: Tensor, scale: float) -> "_BlockSoftmax":
        exponent = logits.detach() * scale
        own = exponent.gather(1, block.column)
        exponent.scatter_(1, block.column, own.masked_fill(block.inside, -torch.inf))
        shift = exponent.amax(1, keepdim=True).clamp_(min=torch.finfo(exponent.dtype).min)
        return cls(block, logits, own, exponent.sub_(shift).exp_(), shift)


class _RowSums:
    """The two softmax numbers of each row over the blocks so far, (B, 1) each."""

    def __init__(self, classes: Classes) -> None:
        self.shard = classes.shard
        self.others = self.own = torch.empty(0)

    def add(self, softmax: _BlockSoftmax) -> None:
        others = softmax.exponentials.sum(1, keepdim=True).log_().add_(softmax.shift)
        own = torch.where(softmax.block.inside, softmax.own, -torch.inf)
        self.others, self.own = (
            (torch.logaddexp(self.others, others), torch.maximum(self.own, own)) if len(self.own) else (others, own)
        )

    def over_ranks(self) -> tuple[Tensor, Tensor]:
        return self.shard.logsumexp(self.others[:, 0]), self.shard.maximum(self.own[:, 0].contiguous())


class _MeanLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, classes: Classes, row_loss: RowLoss, logits: Logits, scale: float, *tensors: Tensor
    ) -> Tensor:
        ctx.arguments = classes, logits, scale
        sums, softmaxes = _RowSums(classes), list[_BlockSoftmax]()
        with torch.enable_grad():
            for softmax in _softmaxes(*ctx.arguments):
                sums.add(softmax)
                softmaxes += [softmax] if classes.keep else []
        ctx.kept = softmaxes
        others, own = sums.over_ranks()
        ctx.rows = row_loss(others, own)
        ctx.save_for_backward(*tensors, others)
        return ctx.rows.values.mean()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        refuse_gradient_of_gradient()
        classes, _, scale = ctx.arguments
        grad = grad_outputs[0] * (scale / len(ctx.rows.values))
        grad_others, grad_own = (ctx.rows.of_others * grad)[:, None], (ctx.rows.of_own * grad)[:, None]
        others = ctx.saved_tensors[-1].clamp(min=torch.finfo(grad_own.dtype).min)  # -inf if there is no other class
        gradients = GradientSums(classes)
        with torch.enable_grad(), without_autocast(grad_own):
            for softmax in _popped(ctx.kept) if ctx.kept else _softmaxes(*ctx.arguments):
                block, gradient = softmax.block, softmax.exponentials
                gradient *= torch.exp(softmax.shift - others[:, None]) * grad_others
                own = torch.where(block.inside, grad_own, gradient.gather(1, block.column))
                gradients.add(block, softmax.logits, gradient.scatter_(1, block.column, own))
        return None, None, None, None, *gradients.over_ranks()


def _softmaxes(classes: Classes, logits: Logits, scale: float) -> Iterator[_BlockSoftmax]:
    for block in classes.blocks(with_graph=True):
        yield _BlockSoftmax.of(block, logits(block), scale)


def _popped(softmaxes: list[_BlockSoftmax]) -> Iterator[_BlockSoftmax]:
    """Yield what was kept, last first because it is still in the cache; each block is freed after use."""
    while softmaxes:
        yield softmaxes.pop()
