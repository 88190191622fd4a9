"""Suspected wrong labels: images whose neighbours are of another label."""

from typing import NamedTuple

import torch
from torch import Tensor

NEIGHBORS = 20  # on glyphs and Grocery with 5 % wrong labels precision 0.99 and 0.95; of 10 nearest 0.97 and 0.90
ROWS = 4096  # whose neighbours are compared with each other at once: 2 MB
PLANTED = 0.05  # share of the labels that are made wrong to see how many are found


class Suspects(NamedTuple):
    """Images in the order of suspicion, the most suspect first.

    Args:
        rows: (S,) int64.
        own: (S,) float64, the share of the label's other images among the nearest, of as many as could be there.
        suggested: (S,) int64, the label that most of the nearest have.
        agreeing: (S,) int64, how many of the nearest have it.
    """

    rows: Tensor
    own: Tensor
    suggested: Tensor
    agreeing: Tensor


def suspects(labels: Tensor, neighbors: Tensor) -> Suspects:
    """The images whose nearest agree on another label more than on their own.

    An image is the more suspect the smaller the share of its own label among its k nearest, of the min(k, R) that could
    be there; of equals the more the nearest agree. Images without another one of their label are left out.

    Args:
        labels: (N,) int64.
        neighbors: (N, k) int64, rows of the nearest others.

    Example:
        >>> labels = torch.tensor([0, 0, 0, 1, 1, 0])  # the last one is among those of label 1
        >>> suspects(labels, torch.tensor([[1, 2], [0, 2], [0, 1], [4, 5], [3, 5], [3, 4]])).rows.tolist()
        [5]
    """
    found = labels[neighbors]  # (N, k)
    positives = labels.bincount()[labels] - 1
    same = (found == labels[:, None]).sum(1)
    own = same.double() / positives.clamp(min=1, max=neighbors.shape[1])
    suggested, agreeing = _majority(found, labels)
    rows = ((agreeing > same) & (positives > 0)).nonzero()[:, 0]
    order = (own[rows] - 1e-6 * agreeing[rows]).argsort(stable=True)  # shares differ by 1 / k or more
    rows = rows[order]
    return Suspects(rows, own[rows], suggested[rows], agreeing[rows])


def planted_precision(labels: Tensor, neighbors: Tensor, *, seed: int = 0) -> float:
    """How many of the most suspect images were made wrong, where 5 % of the labels were and as many are looked at.

    What is expected of real suspects: labels that are wrong already count as false alarms here.

    Args:
        labels: (N,) int64 in 0..C-1, C at least 2.
        neighbors: see `suspects`.
        seed: of the labels that are changed.
    """
    generator = torch.Generator().manual_seed(seed)
    classes, count = int(labels.max()) + 1, max(1, round(PLANTED * len(labels)))
    rows = torch.randperm(len(labels), generator=generator)[:count]
    changed = labels.clone()
    changed[rows] = (labels[rows] + torch.randint(1, classes, (count,), generator=generator)) % classes
    found = suspects(changed, neighbors).rows[:count]
    return float(torch.isin(found, rows).double().mean()) if len(found) else 0.0


def _majority(found: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The most frequent label of each row (N, k) beside its own, the smallest of several, and how often it is there."""
    ordered = found.sort(dim=1).values
    times = torch.cat([(rows[:, :, None] == rows[:, None]).sum(2) for rows in ordered.split(ROWS)])
    times = times.masked_fill(ordered == labels[:, None], 0)
    most, place = times.max(1)
    return ordered.gather(1, place[:, None])[:, 0], most
