"""What the pair losses share: rows against columns, so that a batch alone and a batch with a memory are one case."""

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from dmlkit.component import Requirement
from dmlkit.losses.base import Loss, LossConfig


@dataclass(frozen=True)
class Pairs:
    """Each embedding of a batch (B rows) beside each of a reference set (M columns).

    Args:
        rows: (B, D).
        columns: (M, D).
        labels: (B,), of the rows.
        positive: (B, M) bool, of one class; never a row with itself.
        negative: (B, M) bool, of two classes.
    """

    rows: Tensor
    columns: Tensor
    labels: Tensor
    positive: Tensor
    negative: Tensor


def make_pairs(rows: Tensor, labels: Tensor, columns: Tensor, column_labels: Tensor) -> Pairs:
    """Pairs of B rows with M columns, of which the first B are the rows themselves.

    Args:
        rows: (B, D).
        labels: (B,) >= 0.
        columns: (M, D), M >= B.
        column_labels: (M,); a column with -1 belongs to no pair.

    Example:
        >>> labels = torch.tensor([0, 0, 1])
        >>> pairs = make_pairs(torch.eye(3), labels, torch.eye(3), labels)
        >>> pairs.positive.nonzero().tolist()
        [[0, 1], [1, 0]]
    """
    alike = labels[:, None] == column_labels  # (B, M)
    negative = ~alike if column_labels is labels else ~alike & (column_labels >= 0)
    return Pairs(rows, columns, labels, alike.fill_diagonal_(False), negative)


NEEDS_PAIRS = Requirement(
    "sampler.pairs",
    ("of one class and of two",),
    "it compares images with others of their class and with those of other classes",
)


class PairLossConfig(LossConfig, frozen=True, abstract=True):
    """A configuration of a `PairLoss`: a memory of embeddings may stand beside the batch."""

    def requirements(self) -> Iterable[Requirement]:
        return (NEEDS_PAIRS,)


class PairLoss(Loss):
    """A loss whose rows are the batch and whose columns are the batch too, or a memory beside it.

    A member implements `compute_pairs` alone.
    """

    def compute(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        return self.compute_pairs(make_pairs(embeddings, labels, embeddings, labels))

    @abstractmethod
    def compute_pairs(self, pairs: Pairs) -> Tensor:
        """The loss of the rows against the columns, in at least float32; 0 if there is nothing to compare."""


def masked_mean(x: Tensor, where: Tensor) -> Tensor:
    """The mean of the entries kept by ``where``; 0 if none is kept.

    Example:
        >>> masked_mean(torch.tensor([1.0, 5.0, torch.inf]), torch.tensor([True, True, False])).item()
        3.0
    """
    return torch.where(where, x, 0.0).sum() / where.count_nonzero().clamp(min=1)


def masked_logsumexp(x: Tensor, where: Tensor) -> Tensor:
    """log sum_j exp(x_ij) over the columns kept by ``where``: (B, M) -> (B,); -inf if none is kept.

    Example:
        >>> masked_logsumexp(torch.tensor([[1.0, 2.0]]), torch.tensor([[False, True]])).item()
        2.0
    """
    return torch.where(where, x, -torch.inf).logsumexp(1)
