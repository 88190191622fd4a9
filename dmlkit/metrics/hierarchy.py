"""Graded metrics of a hierarchy: a neighbor of the same genus is better than one that shares nothing with the query."""

from typing import ClassVar, Literal

import torch
from pydantic import PositiveFloat
from torch import Tensor
from torch.nn.functional import pad

from dmlkit.metrics.base import MetricConfig, Ranking
from dmlkit.metrics.retrieval import CutoffConfig, Cutoffs


class HierarchicalApConfig(MetricConfig, frozen=True):
    r"""H-AP, the hierarchical average precision of Ramzi et al., ECCV 2022 (arXiv:2207.04873).

    L is the number of levels, and l(k) in 0..L the number of levels at which item k has the class of the query. Each of
    the n_l items with l(k) = l has relevance rel(k), and positives are the items with l(k) > 0:

    .. math:: \mathrm{rel}(k) = \frac{(l(k) / L)^\alpha}{n_{l(k)}}, \quad
            \frac{1}{\sum_k \mathrm{rel}(k)} \sum_{k: l(k) > 0} \frac{1}{\mathrm{rank}(k)}
            \sum_{j: \mathrm{rank}(j) \le \mathrm{rank}(k)} \min(\mathrm{rel}(j), \mathrm{rel}(k))

    All items of the gallery are ranked. With one level it is the average precision.
    """

    name: Literal["h_ap"] = "h_ap"
    alpha: PositiveFloat = 1.0
    """Exponent of the relevance; a larger one counts coarse levels less."""
    key: ClassVar[str] = "h_ap"
    definition: ClassVar[str] = (
        "h_ap: hierarchical average precision; relevance (l/L)^alpha / items that share l levels"
    )
    to_end: ClassVar[bool] = True
    is_graded: ClassVar[bool] = True

    def per_query(self, ranking: Ranking) -> dict[str, Tensor]:
        if ranking.grades is None:
            return {self.key: ranking.precision_sum(ranking.gallery) / ranking.positives}
        level = torch.arange(1, ranking.levels + 1, device=ranking.grades.device)
        shells = (ranking.grades[..., None] == level).double()  # (Q, J, L), whether l(k) = l
        relevance = (level.double() / ranking.levels) ** self.alpha / shells.sum(1).clamp(min=1)  # (Q, L)
        own = (shells * relevance[:, None]).sum(2)  # (Q, J)
        shared = own[..., None].minimum(relevance[:, None])  # min(rel(j), rel(k)) for a j of each level
        counts = pad(shells.cumsum(1), (0, 0, 1, 0))  # (Q, J + 1, L), positives of each level among the first
        ends = ranking.hits_above, (ranking.hits_above + ranking.hits_tied).clamp(max=shells.shape[1])
        above, upto = (counts.gather(1, end[..., None].expand_as(shells)) for end in ends)
        # Item k has each of its m possible ranks i with the same probability; before it are all items above, and of
        # the other tied ones a share (i - a - 1) / (m - 1), where a items are above.
        m = ranking.tied
        slope = (shared * (upto - above - shells)).sum(2) / (m - 1).clamp(min=1)
        offset = (shared * above).sum(2) + own - slope * (ranking.above + 1)
        value = (offset * ranking.harmonic_sums() / m + slope) * (ranking.grades > 0)
        return {self.key: value.sum(1) / own.sum(1)}


class GradedNdcgConfig(CutoffConfig, frozen=True):
    r"""Graded nDCG@k: gain 2^l - 1 for an item that shares l levels with the query, as in Ramzi et al. 2022.

    .. math:: \frac{\sum_{i=1}^{k} (2^{l_i} - 1) / \log_2(i + 1)}{\max_{\text{orders}} \sum_{i=1}^{k}
            (2^{l_i} - 1) / \log_2(i + 1)}
    """

    name: Literal["graded_ndcg"] = "graded_ndcg"
    k: Cutoffs = (10,)
    key: ClassVar[str] = "graded_ndcg@k"
    definition: ClassVar[str] = (
        "graded_ndcg@k: sum over i <= k of (2^l - 1) / log2(i + 1), l = shared levels, divided by the ideal one"
    )
    is_graded: ClassVar[bool] = True

    def at(self, ranking: Ranking, k: Tensor) -> Tensor:
        ideals = ranking.ideal_gains(int(k.max()))
        if ranking.grades is None:
            return ranking.discounts(k).sum(1) / ideals[ranking.positives.minimum(k)]
        gained = (ranking.discounts(k) * (2.0**ranking.grades - 1)).sum(1)
        ideal = torch.zeros_like(gained)
        for level in range(ranking.levels):  # 2^l - 1 = 1 + 2 + ... + 2^(l-1), one term per shared level
            ideal += 2.0**level * ideals[(ranking.grades > level).sum(1).minimum(k)]
        return gained / ideal
