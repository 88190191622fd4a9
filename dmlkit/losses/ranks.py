"""Differentiable ranks of the positives of each row: how many columns are more similar to it than the positive is."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK = 2**21  # comparisons computed at once: 8 MB per float32 matrix
DENSE = 2**25  # comparisons up to which a GPU computes them all instead of waiting for the list of positives

Step = Callable[[Tensor], Tensor]
"""Counts a column by how much more similar it is than a positive: 0 far below, 1 far above; 0 for -inf."""


class PositiveRanks:
    """Queries, the rows of a batch, with all columns ordered by their similarity to each.

    The rank of a positive needs its comparison with every column: P M numbers for P positive pairs, where comparing
    all columns with each other would take B M^2. They are computed `CHUNK` at a time, and again in the backward pass.
    On a GPU the list of positive pairs is the only value for which a step waits; batches below 2^25 comparisons, 322
    images, do without it.

    Args:
        similarity: (B, M).
        positive: (B, M) bool.
        negative: (B, M) bool; a column that is neither is not ranked.

    Example:
        >>> positive = torch.tensor([[False, True, False], [True, False, False], [False, False, False]])
        >>> negative = torch.tensor([[False, False, True], [False, False, True], [True, True, False]])
        >>> similarity = torch.tensor([[1.0, 0.2, 0.6], [0.2, 1.0, 0.1], [0.6, 0.1, 1.0]])
        >>> PositiveRanks(similarity, positive, negative).count(negative, lambda excess: (excess > 0).float()).tolist()
        [1.0, 0.0]
    """

    def __init__(self, similarity: Tensor, positive: Tensor, negative: Tensor) -> None:
        self.similarity, self.positive, self.negative = similarity, positive, negative
        columns = similarity.shape[1]
        if may_list(positive):
            self.row, self.column = positive.nonzero(as_tuple=True)
        else:
            cells = torch.arange(positive.numel(), device=positive.device)
            self.row, self.column = cells // columns, cells % columns
        self.own = similarity[self.row, self.column]  # (P,)
        self.counted = positive.any(1) & negative.any(1)  # (B,), the queries that have something to order

    def count(self, among: Tensor, step: Step) -> Tensor:
        """Count, for each positive pair, the columns above the positive: (P,), differentiable once.

        Args:
            among: (B, M) bool, the columns to count. The positive itself adds step(0) if it is among them.
            step: the differentiable count of one column.
        """
        count: Any = _Count.apply  # untyped in torch
        return count(self.similarity.masked_fill(~among, -torch.inf), self.own, self.row, step)

    def sum_of_queries(self, values: Tensor) -> Tensor:
        """Sum values (P,) of positive pairs for each query: (B,)."""
        of_positives = values * self.positive[self.row, self.column]
        return values.new_zeros(len(self.positive)).index_add(0, self.row, of_positives)

    def mean(self, values: Tensor) -> Tensor:
        """Average values (B,) over the queries that have a positive and a negative; 0 if there is none."""
        return (values * self.counted).sum() / self.counted.sum().clamp(min=1)


def may_list(positive: Tensor) -> bool:
    """Return whether to list the positives of (B, M) pairs, rather than compute all pairs without waiting."""
    return positive.is_cpu or positive.numel() * positive.shape[1] > DENSE


class _Count(torch.autograd.Function):
    """Sum of steps over the columns of a row, for each positive pair; the backward pass computes the steps again."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, own: Tensor, row: Tensor, step: Step) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(scores, own, row)
        ctx.step = step
        counts = torch.empty_like(own)
        for excess, pairs in _chunks(scores, own, row):
            counts[pairs] = step(excess).sum(1)
        return counts

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        scores, own, row = ctx.saved_tensors
        of_scores, of_own = torch.zeros_like(scores), torch.empty_like(own)
        for excess, pairs in _chunks(scores, own, row):
            with torch.enable_grad():
                value = ctx.step(excess.requires_grad_())
            (slope,) = torch.autograd.grad(value, excess, grad_outputs[0][pairs, None].expand_as(value))
            of_scores.index_add_(0, row[pairs], slope)
            of_own[pairs] = -slope.sum(1)
        return of_scores, of_own, None, None


def _chunks(scores: Tensor, own: Tensor, row: Tensor) -> Iterator[tuple[Tensor, slice]]:
    """Yield the excess of all columns over the positives (n, M) of a slice of the pairs, which it yields too."""
    size = max(1, CHUNK // scores.shape[1])
    for start in range(0, len(row), size):
        pairs = slice(start, start + size)
        yield scores.index_select(0, row[pairs]).sub_(own[pairs, None]), pairs
