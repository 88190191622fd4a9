"""Which label to ask about next: the most doubtful one, or one drawn at random."""

import numpy as np
from pydantic import BaseModel

from dmlkit.metrics.audit import LabelAudit


class LabelQuestion(BaseModel, frozen=True, extra="forbid"):
    """A label to check."""

    row: int
    """Position of the proposal."""
    is_draw: bool
    """Whether the label was drawn uniformly from all unchecked ones; otherwise it was the most doubtful one."""


def next_question(
    found: LabelAudit,
    left: np.ndarray,
    wrong: float,
    audit: float,
    random: np.random.Generator,
    *,
    repeated: np.ndarray | None = None,
) -> LabelQuestion:
    """Choose the label to check next: the most doubtful one, or one drawn uniformly.

    Doubtful labels are checked if this is expected to save more draws than it costs answers.

    Args:
        found: the answers so far.
        left: (N,) bool, labels that were not asked about; at least one.
        wrong: share of wrong labels to reach.
        audit: share of draws while doubtful labels are checked.
        random: random numbers.
        repeated: (N,) bool, labels of near-duplicates of images that were asked about; only a draw asks about these.
    """
    rows = np.flatnonzero(left)
    doubtful = rows if repeated is None else rows[~repeated[rows]]
    is_draw = random.random() < audit or not len(doubtful)
    if is_draw or best_doubtful(found, found.probabilities[rows], int(wrong * len(left))) == 0:
        return LabelQuestion(row=int(random.choice(rows)), is_draw=True)
    return LabelQuestion(row=int(doubtful[found.probabilities[doubtful].argmin()]), is_draw=False)


def best_doubtful(found: LabelAudit, probabilities: np.ndarray, most: int) -> int:
    """Return after how many of the most doubtful labels only draws should follow, for the fewest answers in all.

    Args:
        found: the answers so far.
        probabilities: (R,), of the labels that were not asked about.
        most: largest number of wrong labels to reach.
    """
    doubts = np.sort(wrong_share(found) * (1 - probabilities))[::-1].clip(max=1)
    checked = np.arange(len(doubts))
    expected = doubts.sum() - np.concatenate([[0.0], doubts.cumsum()[:-1]])
    return int((checked + found.draws_until(most, expected, doubts.size - checked.astype(np.float64))).argmin())


def wrong_share(found: LabelAudit) -> float:
    """Return how many wrong labels were found, relative to those that their probabilities expected."""
    return (found.found + 1) / (float((1 - found.probabilities[~found.left]).sum()) + 1)
