"""A bound on how many labels are wrong, from answers of a person, valid at any time that the person stops."""

from collections.abc import Sequence
from functools import reduce

import numpy as np
from numpy.typing import NDArray

Logs = NDArray[np.float64]
RATES = (0.5, 1.0)  # times the expected share
PRIOR = 4  # wrong labels, and as many expected ones, that count as checked before the first answer


class LabelAudit:
    r"""Labels of which a person checks some: those that look doubtful, and an audit of labels drawn uniformly.

    Let M of N labels be wrong. A label that is drawn uniformly from the R that are left is wrong with probability
    :math:`m = (M - S) / R`, where S counts the wrong labels found so far. For any rate q below m that is known before
    the draw, :math:`P_q(x) / P_m(x)` has the mean 1 if M is true, so the product over all draws is a martingale, and so
    is a mean of such products. By Ville's inequality it ever exceeds :math:`1 / \alpha` with a probability of at most
    :math:`\alpha`; the bound is the largest M for which it does not. These are the betting confidence sequences
    without replacement of Waudby-Smith & Ramdas (NeurIPS 2020, arXiv:2006.04347; JRSS-B 2024, arXiv:2010.09686, section
    6) with the bets of a likelihood ratio. The rates q are half and all of the share of wrong labels that is
    `expected` among those that are left; a total whose m is not above q is not bet against. Wrong probabilities make
    the bound wider, not invalid. Labels that are checked because they look doubtful are no draws: they change S and R,
    whatever the rule that chooses them, if it does not look at answers to come.

    Args:
        probabilities: (N,), of each label that it is right, in [0, 1].
        error: alpha, the probability with which the bound may ever be wrong, in (0, 1).

    Example:
        >>> audit = LabelAudit([0.999] * 1000)
        >>> for row in range(300):
        ...     audit.add(row, is_wrong=False, is_draw=True)
        >>> audit.most_wrong(), int(audit.left.sum())
        (8, 700)
    """

    def __init__(self, probabilities: "NDArray[np.float64] | list[float]", error: float = 0.05) -> None:
        self.probabilities = np.asarray(probabilities, dtype=np.float64)
        if not self.probabilities.size or not ((self.probabilities >= 0) & (self.probabilities <= 1)).all():
            raise ValueError("LabelAudit: expected at least one label, with probabilities from 0 to 1")
        if not 0 < error < 1:
            raise ValueError(f"LabelAudit: expected an error between 0 and 1, got {error}")
        self.error = error
        self.left = np.ones(len(self.probabilities), dtype=bool)  # labels that were not checked
        self.found = 0  # wrong labels among those that were checked
        self._totals = np.arange(len(self.left) + 1, dtype=np.float64)  # M
        self._logs: Logs = np.zeros((len(RATES), len(self._totals)))  # of the martingale of each rate, by total

    @property
    def expected(self) -> float:
        """Share of wrong labels among those that are left, by their probabilities times `optimism`, in [0, 1]."""
        return min(self.optimism * float(1 - self.probabilities[self.left].mean()), 1.0) if self.left.any() else 0.0

    @property
    def optimism(self) -> float:
        """Number of wrong labels that were found, relative to the number that the probabilities of the checked ones
        expected, above 0; `PRIOR` keeps it near 1 while few are checked. Above 1 the probabilities are too high.
        """
        return (self.found + PRIOR) / (float((1 - self.probabilities[~self.left]).sum()) + PRIOR)

    def add(self, row: int, *, is_wrong: bool, is_draw: bool) -> None:
        """Add an answer on a label, which ``is_draw`` if it was drawn uniformly from all that were not checked."""
        if not self.left[row]:
            raise ValueError(f"LabelAudit: label {row} was checked already")
        left = int(self.left.sum())
        if is_draw:
            self._logs = self._logs + self._bets(left, is_wrong=is_wrong)
        self.left[row] = False
        self.found += is_wrong

    def most_wrong(self) -> int:
        """Return the largest number of wrong labels among those that were not checked, with confidence 1 - error."""
        return most_wrong_together([self])

    def evidence(self) -> Logs:
        """Return the logarithm of the martingale against each total number of wrong labels: (N + 1,)."""
        return np.logaddexp.reduce(self._logs, axis=0) - np.log(len(RATES))

    def draws_until(self, most: int, expected: Logs, left: Logs) -> Logs:
        """Estimate how many draws bound the wrong labels, if some labels that look doubtful are checked before.

        A draw adds the relative entropy of the expected and the largest share of wrong labels to the logarithm of the
        evidence against one wrong label too many.

        Args:
            most: largest number of wrong labels among those that are not checked.
            expected: (K,) number of wrong labels that are left before the first draw; the first one is that of now.
            left: (K,) number of labels that are left then.

        Returns:
            (K,) numbers of draws; all that are left if draws alone are not enough, 0 for at most ``most`` labels.
        """
        totals = np.clip(self.found + (expected[0] - expected).round() + most + 1, 0, len(self.left)).astype(int)
        best = self._logs[:, totals].max(axis=0) - np.log(len(RATES))  # one rate in the end has most of the mean
        return _draws(most, expected, left, -np.log(self.error) - best)

    def _bets(self, left: int, *, is_wrong: bool) -> Logs:
        """Return the logarithms of the factors of a draw: (rates, totals)."""
        true = np.clip((self._totals - self.found) / left, 0, 1)  # m
        bet = np.clip(np.array(RATES) * self.expected, 1e-6, 0.5)[:, None]  # q
        with np.errstate(divide="ignore"):
            ratio = np.log(bet) - np.log(true) if is_wrong else np.log1p(-bet) - np.log1p(-true)
        # a draw that the total does not allow refutes it, whatever the bet
        return np.where(true == (not is_wrong), np.inf, np.where(bet < true, ratio, 0.0))


def most_wrong_together(audits: Sequence[LabelAudit]) -> int:
    """Return the largest number of wrong labels that several audits of different labels have left unchecked.

    The product of their martingales is a martingale too, since each draw is from one of them. So the bound on the sum
    holds with confidence 1 - error at any time, no error is shared out, and an audit may begin later than others.
    """
    first, others = _evidence(audits)
    counts = np.searchsorted(first, -np.log(audits[0].error) - others) - 1
    return int((counts + np.arange(len(others)))[counts >= 0].max(initial=0))


def draws_until_together(audits: Sequence[LabelAudit], most: int, expected: float) -> float:
    """Estimate how many draws from several audits bound the wrong labels that they leave to ``most``.

    Args:
        expected: expected number of wrong labels among the unchecked ones.
    """
    first, others = _evidence(audits)
    counts = (most + 1 - np.arange(len(others))).clip(0)  # in the first audit, for more than most in all
    against = float((np.append(first, np.inf)[counts.clip(max=len(first))] + others).min())
    left = np.array([sum(float(audit.left.sum()) for audit in audits)])
    missing = np.array([-np.log(audits[0].error) - against])
    return float(_draws(most, np.array([expected]), left, missing)[0]) if left[0] else 0.0


def _evidence(audits: Sequence[LabelAudit]) -> tuple[Logs, Logs]:
    """Return the evidence against so many unchecked wrong labels or more in the first audit, and so many in others."""
    first, *more = (audit.evidence()[audit.found :][: int(audit.left.sum()) + 1] for audit in audits)
    return np.minimum.accumulate(first[::-1])[::-1], reduce(_least_sums, more, np.zeros(1))


def _draws(most: int, expected: Logs, left: Logs, missing: Logs) -> Logs:
    """Return how many draws add the missing evidence against one wrong label too many."""
    rate, allowed = np.clip(expected / left, 1e-9, 1 - 1e-9), np.clip((most + 1) / left, 0, 1 - 1e-9)
    gain = rate * np.log(rate / allowed) + (1 - rate) * np.log((1 - rate) / (1 - allowed))
    draws = np.where(rate < allowed, left * -np.expm1(-missing.clip(0) / (gain.clip(1e-12) * left)), left)
    return np.where(left <= most, 0, draws)


def _least_sums(ours: Logs, others: Logs) -> Logs:
    """Return the least sum of an entry of each vector, by the sum of their positions."""
    sums = np.full(len(ours) + len(others) - 1, np.inf)
    for start, entry in enumerate(ours):
        part = sums[start : start + len(others)]
        np.minimum(part, entry + others, out=part)
    return sums
