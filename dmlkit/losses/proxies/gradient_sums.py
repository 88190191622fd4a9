"""Sums of the gradients of blocks of classes."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor

from dmlkit.distributed.class_shard import ClassShard
from dmlkit.losses.proxies.similarity import PullBack


class TracedBlock(Protocol):
    """The inputs of the gradients of a block of classes."""

    similarity: Tensor
    first: int  # index of the first class
    proxies: Tensor
    pull_back: PullBack


class ClosedForm(NamedTuple):
    """Terms that depend only on the similarities of a block, with their gradient, so that autograd is not needed."""

    values: Tensor  # (w,)
    gradient: Tensor  # (B, w): each column belongs to one term

    def sum(self) -> Tensor:
        """Return the sum of the terms, a scalar."""
        return self.values.sum()


Terms = Tensor | ClosedForm
"""Terms of the classes of a block (w,), or a scalar tensor with their sum."""


class GradientSums:
    """Gradients summed over all blocks: (B, D) for embeddings, (n, ...) for proxies, and one for each parameter.

    Args:
        embeddings: (B, D).
        proxies: (n, ...), the proxies of all blocks.
        parameters: other tensors that the loss depends on.
        shard: the assignment of classes to ranks.
    """

    def __init__(self, embeddings: Tensor, proxies: Tensor, parameters: Sequence[Tensor], shard: ClassShard) -> None:
        self.like, self.shard = (embeddings, *parameters), shard
        self.of_proxies = torch.empty_like(proxies, memory_format=torch.contiguous_format)  # rows, written once
        self.of_shared: list[Tensor] = []  # of embeddings and parameters, which every block adds to

    def add_terms(self, block: TracedBlock, terms: Terms) -> Tensor:
        """Add the gradients of the sum of a block's terms and return the sum."""
        total = terms.sum()
        if isinstance(terms, ClosedForm):
            self.add(block, block.similarity, terms.gradient)
        else:
            self.add(block, total)
        return total.detach()

    def add(self, block: TracedBlock, outputs: Tensor, gradient: Tensor | None = None) -> None:
        """Add the gradients of ``outputs`` of a block times ``gradient``, which may be omitted for a scalar."""
        rows = self.of_proxies[block.first : block.first + len(block.proxies)]
        if outputs is block.similarity:  # autograd would return its input, and take 50 us
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
        """Return the sums; those of embeddings and parameters are summed over the ranks, as all ranks contribute."""
        embeddings, *parameters = (self.shard.sum(total) for total in self.of_shared)
        return embeddings, self.of_proxies, *parameters


def refuse_gradient_of_gradient() -> None:
    """Reject ``create_graph=True`` in a closed-form backward pass, whose result would silently count as a constant.

    Raises:
        RuntimeError: ``create_graph=True`` was used.
    """
    if torch.is_grad_enabled():
        raise RuntimeError("proxy losses do not support second derivatives; use create_graph=False")
