"""Adding up the gradients of blocks of classes."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor

from dmlkit.distributed.class_shard import ClassShard
from dmlkit.losses.proxies.similarity import PullBack


class TracedBlock(Protocol):
    """What the gradients of a block of classes begin with."""

    similarity: Tensor
    first: int  # position of the first class
    proxies: Tensor
    pull_back: PullBack


class ClosedForm(NamedTuple):
    """Terms that depend on the similarities of a block alone, with their gradient, for which autograd is not asked."""

    values: Tensor  # (w,)
    gradient: Tensor  # (B, w): each column is its term's

    def sum(self) -> Tensor:
        """A scalar, as that of a tensor of terms."""
        return self.values.sum()


Terms = Tensor | ClosedForm
"""Of the classes of a block (w,), or a tensor of their sum."""


class GradientSums:
    """Gradients of all blocks together: (B, D) for embeddings, (n, ...) for proxies, and one for each parameter.

    Args:
        embeddings: (B, D).
        proxies: (n, ...) of all blocks.
        parameters: that the loss depends on besides.
        shard: where the other classes are.
    """

    def __init__(self, embeddings: Tensor, proxies: Tensor, parameters: Sequence[Tensor], shard: ClassShard) -> None:
        self.like, self.shard = (embeddings, *parameters), shard
        self.of_proxies = torch.empty_like(proxies, memory_format=torch.contiguous_format)  # rows, written once
        self.of_shared: list[Tensor] = []  # of embeddings and parameters, which every block adds to

    def add_terms(self, block: TracedBlock, terms: Terms) -> Tensor:
        """Add the gradients of the sum of a block's terms; returns the sum."""
        total = terms.sum()
        if isinstance(terms, ClosedForm):
            self.add(block, block.similarity, terms.gradient)
        else:
            self.add(block, total)
        return total.detach()

    def add(self, block: TracedBlock, outputs: Tensor, gradient: Tensor | None = None) -> None:
        """Add the gradients of ``outputs``, computed from a block, times their own: 1 of a scalar if not given."""
        rows = self.of_proxies[block.first : block.first + len(block.proxies)]
        if outputs is block.similarity:  # autograd would give back what it gets, and take 50 us
            of_similarity, of_proxies, *of_parameters = gradient, None
        else:
            leaves = block.similarity, block.proxies, *self.like[1:]
            found = torch.autograd.grad(outputs, leaves, gradient, allow_unused=True)
            of_similarity, of_proxies, *of_parameters = cast(Sequence[Tensor | None], found)
        if of_similarity is None:
            new = [torch.zeros_like(given) for given in self.like]
            rows.zero_()
        else:
            new = [*block.pull_back(of_similarity, rows)]
        for at, more in enumerate(of_parameters, start=1):
            new[at] = new[at] if more is None else new[at] + more
        if of_proxies is not None:
            rows += of_proxies
        self.of_shared = (
            [old.add_(more) for old, more in zip(self.of_shared, new, strict=True)] if self.of_shared else new
        )

    def over_ranks(self) -> tuple[Tensor, ...]:
        """The sums; those of embeddings and parameters, to which every rank's classes contribute, over all ranks."""
        embeddings, *parameters = (self.shard.sum(total) for total in self.of_shared)
        return embeddings, self.of_proxies, *parameters


def refuse_gradient_of_gradient() -> None:
    """Refuse ``create_graph=True`` in a backward pass in closed form, which would silently count as a constant.

    Raises:
        RuntimeError: it was asked for.
    """
    if torch.is_grad_enabled():
        raise RuntimeError("the gradient of a proxy loss has no gradient of its own; use create_graph=False")
