"""A bound on how many labels are wrong, from answers of a person, valid at any time that the person stops."""

import numpy as np
from numpy.typing import NDArray

Logs = NDArray[np.float64]
RATES = (0.1, 0.3, 1.0, 3.0)  # times the expected share of wrong labels; probabilities may be optimistic or pessimistic


class LabelAudit:
    r"""Labels of which a person checks some: those that look doubtful, and an audit of labels drawn uniformly.

    Let M of N labels be wrong. A label that is drawn uniformly from the R that are left is wrong with probability
    :math:`m = (M - S) / R`, where S counts the wrong labels found so far. For any rate q below m that is known before
    the draw, :math:`P_q(x) / P_m(x)` has the mean 1 if M is true, so the product over all draws is a martingale, and so
    is a mean of such products. By Ville's inequality it ever exceeds :math:`1 / \alpha` with a probability of at most
    :math:`\alpha`; the bound is the largest M for which it does not. These are the betting confidence sequences
    without replacement of Waudby-Smith & Ramdas (NeurIPS 2020, arXiv:2006.04347; JRSS-B 2024, arXiv:2010.09686, section
    6) with the bets of a likelihood ratio. The rates q are 0.1, 0.3, 1 and 3 times the share of wrong labels that the
    probabilities expect among those that are left; a total whose m is not above q is not bet against. Wrong
    probabilities make the bound wider, not invalid. Labels that are checked because they look doubtful are no draws:
    they change S and R, whatever the rule that chooses them, if it does not look at answers to come.

    Args:
        probabilities: (N,), of each label that it is right, in [0, 1].
        error: alpha, the probability with which the bound may ever be wrong, in (0, 1).

    Raises:
        ValueError: there is no label, or a probability or the error is out of range.

    Example:
        >>> audit = LabelAudit([0.999] * 1000)
        >>> for row in range(300):
        ...     audit.add(row, is_wrong=False, is_draw=True)
        >>> audit.most_wrong(), int(audit.left.sum())
        (9, 700)
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
        self.draws = self.drawn_wrong = 0
        self._totals = np.arange(len(self.left) + 1, dtype=np.float64)  # M
        self._logs: Logs = np.zeros((len(RATES), len(self._totals)))  # of the martingale of each rate, by total

    @property
    def expected(self) -> float:
        """Share of wrong labels among those that are left, by their probabilities."""
        return float(1 - self.probabilities[self.left].mean()) if self.left.any() else 0.0

    def add(self, row: int, *, is_wrong: bool, is_draw: bool) -> None:
        """Add an answer on a label.

        Args:
            row: the label.
            is_wrong: whether it is wrong.
            is_draw: whether it was drawn uniformly from all labels that were not checked.

        Raises:
            ValueError: the label was checked before.
        """
        if not self.left[row]:
            raise ValueError(f"LabelAudit: label {row} was checked already")
        left = int(self.left.sum())
        if is_draw:
            self._logs = self._logs + self._bets(np.array([is_wrong]), self.found, left, self.expected)[0]
            self.draws, self.drawn_wrong = self.draws + 1, self.drawn_wrong + is_wrong
        self.left[row] = False
        self.found += is_wrong

    def most_wrong(self) -> int:
        """Return the largest number of wrong labels among those that were not checked, with confidence 1 - error."""
        return self._bound(self._logs, self.found, int(self.left.sum()))

    def draws_until(self, most: int) -> int | None:
        """Estimate how many more draws lower the bound to a number, if as many of them are wrong as so far.

        Args:
            most: the largest number of wrong labels among those that are not checked.

        Returns:
            The number of draws, to half a percent of the labels; None if only checking all labels is enough.
        """
        if self.most_wrong() <= most:
            return 0
        left = int(self.left.sum())
        rate = self.drawn_wrong / self.draws if self.draws else 0.0
        logs, found, expected = self._logs, self.found, self.expected
        step = max(1, left // 200)
        for draws in range(0, left, step):
            if self._bound(logs, found, left - draws) <= most:
                return draws
            wrong = round(rate * (draws + step)) - round(rate * draws)
            answers = np.arange(min(step, left - draws)) < wrong
            logs = logs + self._bets(answers, found, left - draws, expected).sum(0)
            found += wrong
        return None

    def _bets(self, wrong: NDArray[np.bool_], found: int, left: int, expected: float) -> Logs:
        """Return the logarithms of the factors of consecutive draws: (draws, rates, totals)."""
        before = np.concatenate([[0], np.cumsum(wrong)[:-1]])
        true = (self._totals - found - before[:, None]) / (left - np.arange(len(wrong)))[:, None]  # m
        true = np.clip(true, 0, 1)[:, None, :]
        bet = np.clip(np.array(RATES) * expected, 1e-6, 0.5)[None, :, None]  # q
        with np.errstate(divide="ignore"):
            ratio = np.where(wrong[:, None, None], np.log(bet) - np.log(true), np.log1p(-bet) - np.log1p(-true))
        # a draw that the total does not allow refutes it, whatever the bet
        impossible = np.where(wrong[:, None, None], true == 0, true == 1)
        return np.where(impossible, np.inf, np.where(bet < true, ratio, 0.0))

    def evidence(self) -> Logs:
        """Return the logarithm of the martingale against each total number of wrong labels: (N + 1,)."""
        return np.logaddexp.reduce(self._logs, axis=0) - np.log(len(RATES))

    def _bound(self, logs: Logs, found: int, left: int) -> int:
        evidence = np.logaddexp.reduce(logs, axis=0) - np.log(len(RATES))
        kept = (self._totals >= found) & (self._totals <= found + left) & (evidence < -np.log(self.error))
        return int(np.flatnonzero(kept)[-1]) - found if kept.any() else 0
