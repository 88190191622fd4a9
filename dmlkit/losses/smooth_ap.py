"""Smooth-AP: average precision with a sigmoid instead of each step of the ranks."""

import torch
from pydantic import PositiveFloat
from torch import Tensor

from dmlkit.losses.pair_loss import PairLoss, Pairs
from dmlkit.losses.ranks import PositiveRanks


class SmoothAP(PairLoss, name="smooth_ap"):
    r"""Smooth-AP (Brown et al. 2020): one minus the average precision of each image's ranking of the others.

    Brown et al., ECCV 2020 (arXiv:2007.12163), section 3; G(x) = 1 / (1 + e^{-x / tau}), s = relative similarity.

    .. math:: L &= \frac{1}{|Q|} \sum_{q \in Q} \Big(1 - \frac{1}{|P_q|} \sum_{i \in P_q}
            \frac{R_i(P_q)}{R_i(P_q) + R_i(N_q) - 1}\Big) \\
            R_i(S) &= 1 + \sum_{j \in S, j \ne i} G(s_{qj} - s_{qi})

    Q are the images with a positive and a negative in the batch; without any the loss is 0. D: the authors' code counts
    the query among its own positives, at similarity 1; here a query does not rank itself, as in evaluation. D: classes
    may have different numbers of images.

    The positives alone are ranked: P M comparisons for P positive pairs and M columns, computed in chunks.

    Example:
        >>> from dmlkit.manifolds import Sphere
        >>> points = Sphere(2).from_features(torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]))
        >>> loss = SmoothAP(Sphere(2))
        >>> round(loss(points, torch.tensor([0, 0, 1])).item(), 4)  # both rank the other class first: AP = 1 / 2
        0.5
    """

    temperature: PositiveFloat = 0.01
    """tau, width of the sigmoid, in similarity units (cosine on the sphere)."""

    def compute_pairs(self, pairs: Pairs) -> Tensor:
        similarity = self.manifold.relative_similarity(pairs.rows, pairs.columns)  # (B, M)
        ranks = PositiveRanks(similarity / self.temperature, pairs.positive, pairs.negative)
        of_positives = 0.5 + ranks.count(pairs.positive, torch.sigmoid)  # the positive itself counts G(0) = 1/2
        of_negatives = ranks.count(pairs.negative, torch.sigmoid)
        lost = ranks.sum_of_queries(of_negatives / (of_positives + of_negatives))  # 1 - precision
        return ranks.mean(lost / pairs.positive.sum(1).clamp(min=1))
