"""The classes of a step in blocks: value and gradient of a proxy loss without its B x C matrices."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dmlkit.distributed.class_shard import ClassShard
from dmlkit.losses.proxies.gradient_sums import GradientSums, Terms, refuse_gradient_of_gradient
from dmlkit.losses.proxies.similarity import Measure, PullBack
from dmlkit.manifolds.numerics.autocast import without_autocast


@dataclass(frozen=True)
class Classes:
    """A batch and the n classes that this rank compares it with: all classes, its share of them, or a sample."""

    embeddings: Tensor  # (B, D)
    proxies: Tensor  # (n, d) or (n, K, d)
    labels: Tensor  # (B,) the own class of each row among the n; outside 0..n-1 if another rank has it
    measure: Measure
    parameters: tuple[Tensor, ...]  # learnable tensors of the measure
    block_size: int  # classes in a block
    total: int  # classes of the step, over all ranks
    all_labels: Tensor  # (B,), the own class of each row among all classes
    shard: ClassShard  # assignment of classes to ranks
    keep: bool = False  # whether blocks may be kept for the backward pass instead of being computed twice
    chosen: Tensor | None = None  # (n,), indices among this rank's classes; None for all

    @cached_property
    def in_batch(self) -> Tensor:
        """Number of classes that occur in the batch, |P+|, as a tensor: reading the labels would stall a GPU."""
        return self.embeddings.new_zeros(self.shard.num_classes).scatter_(0, self.all_labels, 1).sum()

    def blocks(self, *, with_graph: bool = False) -> "Iterator[Block]":
        """Yield all blocks, optionally with a graph that starts at their similarities, proxies and parameters."""
        for first in range(0, len(self.proxies), self.block_size):
            proxies = self.proxies[first : first + self.block_size].detach().requires_grad_(with_graph)
            with torch.set_grad_enabled(with_graph):
                similarity, pull_back = self.measure(self.embeddings, proxies, self.parameters)
            yield Block(similarity.requires_grad_(with_graph), first, self, proxies, pull_back)


@dataclass
class Block:
    """Similarities of a batch to w consecutive classes."""

    similarity: Tensor  # (B, w); (B, K, w) if the loss itself pools the K
    first: int  # index of the first class
    classes: Classes
    proxies: Tensor  # (w, d) or (w, K, d)
    pull_back: PullBack

    @cached_property
    def column(self) -> Tensor:
        """Column (B, 1) of the own class of each row, clamped into the block: a mask as an index would stall a GPU."""
        return (self.classes.labels - self.first)[:, None].clamp(0, self.similarity.shape[-1] - 1)

    @cached_property
    def inside(self) -> Tensor:
        """Whether the own class of each row is in the block, (B, 1) bool."""
        return (self.classes.labels - self.first)[:, None] == self.column

    @cached_property
    def own(self) -> Tensor:
        """Whether the class is the row's own, (B, w) bool."""
        return self.inside & (self.column == torch.arange(self.similarity.shape[-1], device=self.column.device))


def sum_over_classes(classes: Classes, terms: Callable[[Block], Terms]) -> Tensor:
    """Sum the terms (w,) of all blocks, or the sums of them; the terms of a block depend only on that block."""
    if not torch.is_grad_enabled():
        return classes.shard.sum(torch.stack([terms(block).sum() for block in classes.blocks()]).sum())
    return _SumOverClasses.apply(classes, terms, classes.embeddings, classes.proxies, *classes.parameters)


class _SumOverClasses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, classes: Classes, terms: Callable[[Block], Terms], *tensors: Tensor) -> Tensor:
        ctx.arguments = classes, terms
        ctx.save_for_backward(*tensors)
        value, ctx.gradients = _value_and_gradients(classes, terms)
        return value

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        refuse_gradient_of_gradient()
        (grad,), gradients, ctx.gradients = grad_outputs, ctx.gradients, None  # otherwise autograd copies C x d numbers
        if gradients is None:  # a second backward pass; reading saved_tensors raises if they have changed
            gradients = _value_and_gradients(*ctx.arguments)[1] if ctx.saved_tensors else ()
        is_one = grad.is_cpu and grad.item() == 1  # reading it would stall a GPU
        return None, None, *(gradients if is_one else (gradient.mul_(grad) for gradient in gradients))


def _value_and_gradients(classes: Classes, terms: Callable[[Block], Terms]) -> tuple[Tensor, tuple[Tensor, ...]]:
    gradients = GradientSums(classes.embeddings, classes.proxies, classes.parameters, classes.shard)
    with torch.enable_grad(), without_autocast(classes.embeddings):
        values = [gradients.add_terms(block, terms(block)) for block in classes.blocks(with_graph=True)]
    return classes.shard.sum(sum(values, start=classes.embeddings.new_zeros(()))), gradients.over_ranks()
