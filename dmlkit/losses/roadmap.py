"""ROADMAP: an upper bound of one minus the average precision, and thresholds that hold in every batch."""

from collections.abc import Iterable
from typing import Annotated

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat
from torch import Tensor

from dmlkit.component import Requirement
from dmlkit.losses.pair_loss import PairLoss, Pairs
from dmlkit.losses.ranks import PositiveRanks
from dmlkit.manifolds.base import NEEDS_BOUNDED


class ROADMAP(PairLoss, name="roadmap"):
    r"""ROADMAP (Ramzi et al. 2021): an upper bound of 1 - AP, plus a calibration of similarities across batches.

    Ramzi et al., NeurIPS 2021 (arXiv:2110.01445), section 3; s = relative similarity.

    .. math:: L &= \frac{1}{|Q|} \sum_{q \in Q} (1 - \lambda) \Big(1 - \frac{1}{|P_q|} \sum_{i \in P_q}
            \frac{R^+_i}{R^+_i + R^-_i}\Big) + \lambda \Big(\frac{1}{|P_q|} \sum_{i \in P_q} [\alpha - s_{qi}]_+
            + \frac{1}{|N_q|} \sum_{j \in N_q} [s_{qj} - \beta]_+\Big) \\
            R^+_i &= |\{j \in P_q: s_{qj} \ge s_{qi}\}|, \qquad R^-_i = \sum_{j \in N_q} H(s_{qj} - s_{qi})

    H bounds the step from above and keeps a slope where a negative is far above a positive, unlike a sigmoid:

    .. math:: H(t) = \begin{cases} g(t / \tau) & t \le 0 \\ g(t / \tau) + 1/2 & 0 < t \le \delta \\
            \rho (t - \delta) + g(\delta / \tau) + 1/2 & t > \delta \end{cases}, \qquad g(x) = 1 / (1 + e^{-x})

    The exact rank R+ among positives has no gradient. Q are the images with a positive and a negative in the batch;
    without any the loss is 0. D: the authors' code counts the query among its own positives; here it does not. D: that
    code averages the calibration over the violating pairs of the batch; here over all pairs of each query.

    Positives are ranked in chunks, as in `SmoothAP`.

    Example:
        >>> from dmlkit.manifolds import Sphere
        >>> points = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
        >>> loss = ROADMAP(Sphere(2), calibration_weight=1.0)
        >>> loss(points, torch.tensor([0, 0, 1])).item(), round(loss(points, torch.tensor([0, 1, 0])).item(), 4)
        (0.0, 1.1)
    """

    temperature: PositiveFloat = 0.01
    """tau, width of the sigmoid, in similarity units (cosine on the sphere)."""
    slope: NonNegativeFloat = 100.0
    """rho, slope of H beyond delta, per unit of similarity."""
    sigmoid_end: NonNegativeFloat = 0.05
    """delta, in similarity units, where H becomes linear."""
    calibration_weight: Annotated[float, Field(ge=0, le=1)] = 0.5
    """lambda, weight of the calibration; the ranking has weight 1 - lambda."""
    positive_threshold: float = 0.9
    """alpha, similarity above which positives are not pulled."""
    negative_threshold: float = 0.6
    """beta, similarity below which negatives are not pushed."""

    def requirements(self) -> Iterable[Requirement]:
        return (*super().requirements(), NEEDS_BOUNDED)

    def compute_pairs(self, pairs: Pairs) -> Tensor:
        similarity = self.manifold.relative_similarity(pairs.rows, pairs.columns)  # (B, M)
        ranks = PositiveRanks(similarity, pairs.positive, pairs.negative)
        positives, negatives = (mask.sum(1).clamp(min=1) for mask in (pairs.positive, pairs.negative))
        with torch.no_grad():
            of_positives = ranks.count(pairs.positive, lambda excess: (excess >= 0).to(excess.dtype))
        of_positives = of_positives.clamp(min=1)  # a positive counts itself; cells that are none would give 0 / 0
        of_negatives = ranks.count(pairs.negative, self._bound)
        lost = ranks.sum_of_queries(of_negatives / (of_positives + of_negatives)) / positives
        pull = ((self.positive_threshold - similarity).relu() * pairs.positive).sum(1) / positives
        push = ((similarity - self.negative_threshold).relu() * pairs.negative).sum(1) / negatives
        weight = self.calibration_weight
        return ranks.mean((1 - weight) * lost + weight * (pull + push))

    def _bound(self, excess: Tensor) -> Tensor:
        """Compute H of differences of similarities; -inf gives 0."""
        end = self.sigmoid_end
        smooth = torch.sigmoid(excess.clamp(max=end) / self.temperature)
        return smooth + 0.5 * (excess > 0) + self.slope * (excess - end).relu()
