"""Classes block by block: terms of each class, and their gradient as it is added up."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from dmlkit.distributed.exchange import ClassShard
from dmlkit.losses.proxies.similarity import Measure, PullBack
from dmlkit.manifolds.products import without_autocast


class ClosedForm(NamedTuple):
    """Terms that depend only on the similarities of a block, with their gradient, so that autograd is not needed."""

    values: Tensor  # (w,)
    gradient: Tensor  # (B, w): each column belongs to one term
    of_proxies: Tensor | None = None  # a scalar to add that depends only on the proxies of the block, with a graph

    def sum(self) -> Tensor:
        """Return the sum of the terms, a scalar."""
        return self.values.sum() if self.of_proxies is None else self.values.sum() + self.of_proxies


Terms = Tensor | ClosedForm
"""Terms of the classes of a block (w,), or a scalar tensor with their sum."""


class GradientSums:
    """Gradients summed over all blocks: (B, D) for embeddings, (n, ...) for proxies, and one for each parameter."""

    def __init__(self, classes: "Classes") -> None:
        self.like, self.shard = (classes.embeddings, *classes.parameters), classes.shard
        self.of_proxies = torch.empty_like(classes.proxies, memory_format=torch.contiguous_format)  # rows, written once
        self.of_shared: list[Tensor] = []  # of embeddings and parameters, which every block adds to

    def add_terms(self, block: "Block", terms: Terms) -> Tensor:
        """Add the gradients of the sum of a block's terms and return the sum."""
        total = terms.sum()
        if isinstance(terms, ClosedForm):
            self.add(block, block.similarity, terms.gradient)
            if terms.of_proxies is not None:
                self.rows(block).add_(torch.autograd.grad(terms.of_proxies, block.proxies)[0])
        else:
            self.add(block, total)
        return total.detach()

    def add(self, block: "Block", outputs: Tensor, gradient: Tensor | None = None) -> None:
        """Add the gradients of ``outputs`` of a block times ``gradient``, which may be omitted for a scalar."""
        rows = self.rows(block)
        if outputs is block.similarity:  # autograd would return its input, and take 50 us
            of_similarity, of_proxies, *of_parameters = gradient, None
        else:
            leaves = block.similarity, block.proxies, *self.like[1:]
            gradients = torch.autograd.grad(outputs, leaves, gradient, allow_unused=True)
            of_similarity, of_proxies, *of_parameters = cast(Sequence[Tensor | None], gradients)
        if of_similarity is None:
            new = [torch.zeros_like(tensor) for tensor in self.like]
            rows.zero_()
        else:
            new = [*block.pull_back(of_similarity, rows)]
        for index, of_parameter in enumerate(of_parameters, start=1):
            new[index] = new[index] if of_parameter is None else new[index] + of_parameter
        if of_proxies is not None:
            rows += of_proxies
        self.of_shared = (
            [old.add_(more) for old, more in zip(self.of_shared, new, strict=True)] if self.of_shared else new
        )

    def rows(self, block: "Block") -> Tensor:
        """Return the gradient of the proxies of a block, to write to."""
        return self.of_proxies[block.first : block.first + len(block.proxies)]

    def over_ranks(self) -> tuple[Tensor, ...]:
        """Return the sums; those of embeddings and parameters are summed over the ranks, as all ranks contribute."""
        embeddings, *parameters = (self.shard.sum(total) for total in self.of_shared)
        return embeddings, self.of_proxies, *parameters


def refuse_gradient_of_gradient() -> None:
    """Reject ``create_graph=True`` in a closed-form backward pass, whose result would silently count as a constant."""
    if torch.is_grad_enabled():
        raise RuntimeError("proxy losses do not support second derivatives; use create_graph=False")


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
                similarity, pull_back = self.measure.trace(self.embeddings, proxies, self.parameters)
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
    def is_own(self) -> Tensor:
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
    gradients = GradientSums(classes)
    with torch.enable_grad(), without_autocast(classes.embeddings):
        values = [gradients.add_terms(block, terms(block)) for block in classes.blocks(with_graph=True)]
    return classes.shard.sum(sum(values, start=classes.embeddings.new_zeros(()))), gradients.over_ranks()


@dataclass(frozen=True)
class ComputedClasses(Classes):
    """Classes whose blocks are already computed, for any number of passes without a graph and one with it."""

    ready: list[Block] = field(default_factory=list[Block])

    def blocks(self, *, with_graph: bool = False) -> Iterator[Block]:
        if not with_graph:
            yield from self.ready or super().blocks()
        elif not self.ready:  # a second such pass computes them again
            yield from super().blocks(with_graph=True)
        while with_graph and self.ready:  # last first because it is still in the cache; each is freed after use
            yield self.ready.pop()


def computed_once(classes: Classes) -> Classes:
    """Return the classes with computed blocks; return them unchanged if blocks may not be kept or nothing learns."""
    if not classes.keep or not torch.is_grad_enabled():
        return classes
    ready = list(classes.blocks(with_graph=True))
    return ComputedClasses(**{field.name: getattr(classes, field.name) for field in fields(Classes)}, ready=ready)
