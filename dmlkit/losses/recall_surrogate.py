"""Recall@k surrogate: recall of the first k neighbors with sigmoids instead of steps, and similarity mixup."""

from typing import Annotated

import torch
from pydantic import Field, PositiveFloat, PositiveInt
from torch import Tensor

from dmlkit.losses.pair_loss import PairLoss, Pairs
from dmlkit.losses.ranks import PositiveRanks


class RecallSurrogate(PairLoss, name="recall_surrogate"):
    r"""Recall@k surrogate (Patel et al. 2022): one minus a smooth recall of the first k neighbors, for several k.

    Patel et al., CVPR 2022 (arXiv:2108.11179), section 3; g(x) = 1 / (1 + e^{-x}), s = relative similarity.

    .. math:: L &= \frac{1}{|Q|} \sum_{q \in Q} \frac{1}{|K|} \sum_{k \in K} \Big(1 -
            \min\Big(1, \frac{1}{\min(k, |P_q|)} \sum_{i \in P_q} g\big((k - r_i) / \tau_1\big)\Big)\Big) \\
            r_i &= 1 + \sum_{j \ne i} g\big((s_{qj} - s_{qi}) / \tau_2\big)

    Q are the images with a positive and a negative in the batch; without any the loss is 0. The two minima are those of
    the authors' code. D: that code counts the query itself as a neighbor, at similarity 1; here it does not.

    ``mixup`` is the paper's similarity mixup (SiMix): each pair x, z of a class adds a virtual image v with
    s(v, w) = a s(x, w) + (1 - a) s(z, w) and a uniform in 0..1, both as a query and as a neighbor. It mixes
    similarities, so it works in any space. A class of m images gets m (m - 1) / 2 virtual ones, and time and memory
    grow with the square of all. Without it, positives are ranked in chunks, as in `SmoothAP`.

    Example:
        >>> from dmlkit.manifolds import Sphere
        >>> points = Sphere(2).from_features(torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]))
        >>> loss = RecallSurrogate(Sphere(2), at=(1,))
        >>> round(loss(points, torch.tensor([0, 0, 1])).item(), 4)  # both positives have rank 2: 1 - g(1 - 2)
        0.7311
    """

    at: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] = (1, 2, 4, 8, 16)
    """K, the lengths of the lists of neighbors."""
    rank_temperature: PositiveFloat = 1.0
    """tau_1, width of the sigmoid over ranks, in ranks."""
    temperature: PositiveFloat = 0.01
    """tau_2, width of the sigmoid over similarities, in similarity units (cosine on the sphere)."""
    mixup: bool = False
    """Add virtual images between the images of a class; in training only."""

    @property
    def takes_several_labels(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return not self.mixup  # a virtual image would have the labels of one of the two that it mixes

    def compute_pairs(self, pairs: Pairs) -> Tensor:
        similarity = self.manifold.relative_similarity(pairs.rows, pairs.columns) / self.temperature  # (B, M)
        positive, negative = pairs.positive, pairs.negative
        if self.mixup and self.training:
            similarity, positive, negative = mix_similarities(similarity, positive, negative)
        ranks = PositiveRanks(similarity, positive, negative)
        rank = 0.5 + ranks.count(positive | negative, torch.sigmoid)  # (P,); the positive itself counts g(0) = 1/2
        positives = positive.sum(1)
        missed = torch.zeros_like(similarity[:, 0])
        for k in self.at:
            hits = ranks.sum_of_queries(torch.sigmoid((k - rank) / self.rank_temperature))
            missed = missed + (1 - hits / positives.clamp(min=1, max=k)).relu()
        return ranks.mean(missed / len(self.at))


def mix_similarities(similarity: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Add V virtual images, one for each pair of a class within the batch, to the similarities and pairs (B, M).

    Returns:
        The three matrices (B + V, M + V). The virtual images are the last V rows and columns.
    """
    rows = len(similarity)
    x, z = positive[:, :rows].triu(1).nonzero(as_tuple=True)  # (V,) each
    share = torch.rand(len(x), device=similarity.device, dtype=similarity.dtype)
    same = positive.clone()
    same[:, :rows].fill_diagonal_(True)
    similarity = torch.cat([similarity, share * similarity[:, x] + (1 - share) * similarity[:, z]], 1)
    share = share[:, None]
    similarity = torch.cat([similarity, share * similarity[x] + (1 - share) * similarity[z]])
    same, negative = (torch.cat([mask, mask[:, x]], 1) for mask in (same, negative))
    same, negative = (torch.cat([mask, mask[x]]) for mask in (same, negative))
    own = torch.arange(len(same), device=same.device)
    same[own, torch.where(own < rows, own, own + same.shape[1] - len(same))] = False
    return similarity, same, negative
