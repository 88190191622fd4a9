"""Base of the pair losses: compares rows with columns, so that the code is the same with and without a memory."""

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from dmlkit.component import Requirement
from dmlkit.losses.base import Loss


@dataclass(frozen=True)
class Pairs:
    """The pairs of each embedding of a batch (B rows) with each of a reference set (M columns)."""

    rows: Tensor  # (B, D)
    columns: Tensor  # (M, D)
    labels: Tensor  # (B,), the labels of the rows
    positive: Tensor
    """(B, M) bool, whether both have the same label, or share one of several; False for a row with itself."""
    negative: Tensor  # (B, M) bool, whether they do not


def make_pairs(
    rows: Tensor, labels: Tensor, columns: Tensor, column_labels: Tensor, members: Tensor | None = None
) -> Pairs:
    """Return the pairs of B rows with M columns, of which the first B are the rows themselves.

    Args:
        rows: (B, D).
        labels: (B,) >= 0.
        columns: (M, D), M >= B.
        column_labels: (M,); a column with -1 belongs to no pair.
        members: (C, L) bool, which of several labels each class has; None if each class is a label of its own.
    """
    if members is None:
        same = labels[:, None] == column_labels  # (B, M)
    else:
        same = members[labels].to(rows.dtype) @ members[column_labels].to(rows.dtype).T > 0
        same &= column_labels >= 0
    negative = ~same if column_labels is labels else ~same & (column_labels >= 0)
    return Pairs(rows, columns, labels, same.fill_diagonal_(False), negative)


NEEDS_PAIRS = Requirement(
    "sampler.pairs",
    ("of the same class and of different classes",),
    "it compares images with others of their class and with those of other classes",
)


class PairLoss(Loss):
    """A loss that compares rows, the batch, with columns: the batch, or the batch and a memory.

    A subclass only implements `compute_pairs`.
    """

    takes_several_labels = True
    _members: Tensor | None = None  # (C, L) bool; see `use_members`

    def use_members(self, members: Tensor | None) -> None:
        if not self.takes_several_labels:
            super().use_members(members)
        self._members = members

    def requirements(self) -> Iterable[Requirement]:
        return (NEEDS_PAIRS,)

    def compute(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        return self.compute_pairs(self.pairs(embeddings, labels, embeddings, labels))

    def pairs(self, rows: Tensor, labels: Tensor, columns: Tensor, column_labels: Tensor) -> Pairs:
        """Return `make_pairs` by the labels that this loss knows."""
        if self._members is not None:
            self._members = self._members.to(rows.device)
        return make_pairs(rows, labels, columns, column_labels, self._members)

    @abstractmethod
    def compute_pairs(self, pairs: Pairs) -> Tensor:
        """Compute the loss of the rows against the columns, in at least float32; 0 if there is nothing to compare."""


def masked_mean(x: Tensor, where: Tensor) -> Tensor:
    """Return the mean of the entries kept by ``where``; 0 if none is kept."""
    return torch.where(where, x, 0.0).sum() / where.count_nonzero().clamp(min=1)


def masked_logsumexp(x: Tensor, where: Tensor) -> Tensor:
    """Compute log sum_j exp(x_ij) over the columns kept by ``where``: (B, M) -> (B,); -inf if none is kept."""
    return torch.where(where, x, -torch.inf).logsumexp(1)
