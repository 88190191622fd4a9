"""Retrieval metrics, computed per query from its ranking, as expectations over ties; two are graded by a hierarchy."""

from abc import abstractmethod
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field, PositiveFloat, PositiveInt, model_validator
from torch import Tensor
from torch.nn.functional import pad

from dmlkit.metrics.base import MetricConfig, Ranking

Cutoffs = Annotated[tuple[PositiveInt, ...], Field(min_length=1)]


class CutoffConfig(MetricConfig, frozen=True, abstract=True):
    """Base of metrics of the k nearest neighbors."""

    k: Cutoffs
    """Cut-offs k; each gives one metric."""

    def cutoffs(self) -> tuple[int, ...]:
        return self.k

    def per_query(self, ranking: Ranking) -> dict[str, Tensor]:
        cutoffs = zip(self.names(), self.k, strict=True)
        return {name: self.at(ranking, ranking.gallery.clamp(max=k)) for name, k in cutoffs}

    @abstractmethod
    def at(self, ranking: Ranking, k: Tensor) -> Tensor:
        """Compute the metric of each query for its cut-off (Q,) int64, at most the size of the gallery, (Q,)."""


class RecallConfig(CutoffConfig, frozen=True):
    """R@k, the share of queries with a hit among their k nearest neighbors."""

    name: Literal["recall"] = "recall"
    k: Cutoffs = (1, 2, 4, 8)
    key: ClassVar[str] = "recall@k"
    definition: ClassVar[str] = "recall@k: any hit in the k nearest"
    first_only: ClassVar[bool] = True

    def at(self, ranking: Ranking, k: Tensor) -> Tensor:
        return ranking.any_within(k)


class PrecisionConfig(CutoffConfig, frozen=True):
    """P@k, the share of hits among the k nearest; P@1 equals R@1.

    ``compat: oml`` divides by min(k, R) like open-metric-learning, and reports ``precision@k:oml``.
    """

    name: Literal["precision"] = "precision"
    k: Cutoffs = (1,)
    compat: Literal["oml"] | None = None
    """``oml`` divides by min(k, R) like open-metric-learning."""
    key: ClassVar[str] = "precision@k"
    definition: ClassVar[str] = "precision@k: hits in the k nearest / k (:oml / min(R, k))"

    def at(self, ranking: Ranking, k: Tensor) -> Tensor:
        divisor = k.minimum(ranking.positives) if self.compat == "oml" else k
        return ranking.hits_within(k) / divisor


class RPrecisionConfig(MetricConfig, frozen=True):
    """R-Precision, the share of hits among the R nearest (Musgrave et al., ECCV 2020, arXiv:2003.08505)."""

    name: Literal["r_precision"] = "r_precision"
    definition: ClassVar[str] = "r_precision: hits in the R nearest / R"
    to_r: ClassVar[bool] = True

    def per_query(self, ranking: Ranking) -> dict[str, Tensor]:
        return {"r_precision": ranking.hits_within(ranking.positives) / ranking.positives}


class MapAtKConfig(CutoffConfig, frozen=True):
    r"""MAP@k, the sum of the precisions at the hits among the k nearest, divided by the possible number min(R, k).

    .. math:: \frac{1}{\min(R, k)} \sum_{i=1}^{k} P(i) \, \mathrm{rel}_i

    Other libraries divide by other numbers. ``compat`` selects one, and the metric is reported as e.g. ``map@10:oml``:
    ``pml`` (pytorch-metric-learning) divides by R, ``oml`` (open-metric-learning) by the number of hits found, and
    ``mpa`` (Saeki et al. 2022, Table 1) by k.
    """

    name: Literal["map_at_k"] = "map_at_k"
    k: Cutoffs = (10,)
    compat: Literal["pml", "oml", "mpa"] | None = None
    """Divisor of another library: ``pml`` divides by R, ``oml`` by the hits found, ``mpa`` by k."""
    key: ClassVar[str] = "map@k"
    definition: ClassVar[str] = (
        "map@k: (1/min(R, k)) sum over i <= k of precision(i) * hit(i) (:pml / R, :oml / hits found, :mpa / k)"
    )

    def at(self, ranking: Ranking, k: Tensor) -> Tensor:
        match self.compat:
            case "pml":
                divisor = ranking.positives
            case "oml":
                divisor = ranking.hits_within(k).clamp(min=1)
            case "mpa":
                divisor = k
            case None:
                divisor = ranking.positives.minimum(k)
        return ranking.precision_sum(k) / divisor


class MapAtRConfig(MetricConfig, frozen=True):
    r"""MAP@R of Musgrave et al., ECCV 2020 (arXiv:2003.08505), eq. 3-4.

    .. math:: \frac{1}{R} \sum_{i=1}^{R} P(i) \, \mathrm{rel}_i
    """

    name: Literal["map_at_r"] = "map_at_r"
    key: ClassVar[str] = "map@r"
    definition: ClassVar[str] = "map@r: (1/R) sum over i <= R of precision(i) * hit(i)"
    to_r: ClassVar[bool] = True

    def per_query(self, ranking: Ranking) -> dict[str, Tensor]:
        return {"map@r": ranking.precision_sum(ranking.positives) / ranking.positives}


class MapConfig(MetricConfig, frozen=True):
    r"""mAP, the mean average precision over the whole gallery, as in re-identification (Market-1501).

    .. math:: \frac{1}{R} \sum_{i} P(i) \, \mathrm{rel}_i
    """

    name: Literal["map"] = "map"
    definition: ClassVar[str] = "map: (1/R) sum over the whole gallery of precision(i) * hit(i)"
    to_end: ClassVar[bool] = True

    def per_query(self, ranking: Ranking) -> dict[str, Tensor]:
        return {"map": average_precision(ranking)}


def average_precision(ranking: Ranking) -> Tensor:
    """Compute the average precision over the whole gallery, (Q,) float64."""
    return ranking.precision_sum(ranking.gallery) / ranking.positives


class MrrConfig(MetricConfig, frozen=True):
    """MRR, the mean of 1 / rank of the first hit, over the whole gallery."""

    name: Literal["mrr"] = "mrr"
    definition: ClassVar[str] = "mrr: 1 / rank of the first hit; 0 if there is none"
    first_only: ClassVar[bool] = True

    def per_query(self, ranking: Ranking) -> dict[str, Tensor]:
        above, m, h = ranking.above[:, 0], ranking.tied[:, 0], ranking.hits_tied[:, 0]
        value = (above < ranking.gallery) / (above + 1).double()
        tied = m > h
        if tied.any():
            value[tied] = expected_reciprocal(above[tied], m[tied], h[tied])
        return {"mrr": value}


def expected_reciprocal(above: Tensor, tied: Tensor, hits: Tensor) -> Tensor:
    r"""Compute E[1 / (a + X)], (Q,) float64, where X is the position of the first of h hits among m tied items.

    .. math:: P(X > x) = \prod_{i=1}^{x} \frac{m - h - i + 1}{m - i + 1}
    """
    cases, case = torch.stack([above, tied, hits]).unique(dim=1, return_inverse=True)
    values: list[Tensor] = []
    for a, m, h in cases.T.tolist():
        x = torch.arange(1, m - h + 2, dtype=torch.float64)  # the possible positions of the first hit
        later = ((m - h - x + 1) / (m - x + 1)).cumprod(0)  # P(X > x)
        values.append(((torch.cat([later.new_ones(1), later[:-1]]) - later) / (a + x)).sum())
    return torch.stack(values).to(above.device)[case]


class NdcgConfig(CutoffConfig, frozen=True):
    r"""nDCG@k with binary gains (Saeki et al. 2022, eq. 10-11).

    .. math:: \frac{\sum_{i=1}^{k} \mathrm{rel}_i / \log_2(i + 1)}{\sum_{i=1}^{\min(R, k)} 1 / \log_2(i + 1)}
    """

    name: Literal["ndcg"] = "ndcg"
    k: Cutoffs = (10,)
    key: ClassVar[str] = "ndcg@k"
    definition: ClassVar[str] = "ndcg@k: sum over i <= k of hit(i) / log2(i + 1), divided by that of an ideal ranking"

    def at(self, ranking: Ranking, k: Tensor) -> Tensor:
        return binary_ndcg(ranking, k)


def binary_ndcg(ranking: Ranking, k: Tensor) -> Tensor:
    """Compute nDCG at the cut-off (Q,) of each query with a gain of 1 for every positive, (Q,) float64."""
    ideal = ranking.ideal_gains(int(k.max()))[ranking.positives.minimum(k)]
    return ranking.discounts(k).sum(1) / ideal


class CmcConfig(CutoffConfig, frozen=True):
    """CMC@k, which equals recall@k: the name and the ranks used in re-identification and for In-Shop.

    ``compat: cuhk03`` is single-shot: the gallery has one image of each class, drawn at random from those that are no
    junk of the query. It is the mean over all draws, and is reported as e.g. ``cmc@1:cuhk03``.
    """

    name: Literal["cmc"] = "cmc"
    k: Cutoffs = (1, 10, 20, 30, 40, 50)
    compat: Literal["cuhk03"] | None = None
    """``cuhk03`` searches a gallery with one image of each class, on average over all draws of them."""
    key: ClassVar[str] = "cmc@k"
    definition: ClassVar[str] = (
        "cmc@k: any hit in the k nearest of the gallery; equals recall@k (:cuhk03 with one image drawn per class)"
    )
    first_only: ClassVar[bool] = True

    @model_validator(mode="after")
    def _draws_images_of_classes(self) -> "CmcConfig":
        if self.compat and self.level:
            raise ValueError(f"compat {self.compat} draws an image of each class; remove level {self.level}")
        return self

    def at(self, ranking: Ranking, k: Tensor) -> Tensor:
        if self.compat is None:
            return ranking.any_within(k)
        if ranking.single_shot is None:
            raise ValueError(f"{self.names()[0]}: draws images of a gallery with one label each; remove the metric")
        return ranking.single_shot.gather(1, k[:, None] - 1)[:, 0]


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
    definition: ClassVar[str] = (
        "h_ap: hierarchical average precision; relevance (l/L)^alpha / items that share l levels"
    )
    to_end: ClassVar[bool] = True
    is_graded: ClassVar[bool] = True

    def per_query(self, ranking: Ranking) -> dict[str, Tensor]:
        if ranking.grades is None:
            return {self.key: average_precision(ranking)}
        level = torch.arange(1, ranking.levels + 1, device=ranking.grades.device)
        shells = (ranking.grades[..., None] == level).double()  # (Q, J, L), whether l(k) = l
        relevance = (level.double() / ranking.levels) ** self.alpha / shells.sum(1).clamp(min=1)  # (Q, L)
        own_relevance = (shells * relevance[:, None]).sum(2)  # (Q, J)
        shared = own_relevance[..., None].minimum(relevance[:, None])  # min(rel(j), rel(k)) for a j of each level
        counts = pad(shells.cumsum(1), (0, 0, 1, 0))  # (Q, J + 1, L), positives of each level among the first
        ends = ranking.hits_above, (ranking.hits_above + ranking.hits_tied).clamp(max=shells.shape[1])
        above, upto = (counts.gather(1, end[..., None].expand_as(shells)) for end in ends)
        # Item k has each of its m possible ranks i with the same probability; before it are all items above, and of
        # the other tied ones a share (i - a - 1) / (m - 1), where a items are above.
        m = ranking.tied
        slope = (shared * (upto - above - shells)).sum(2) / (m - 1).clamp(min=1)
        offset = (shared * above).sum(2) + own_relevance - slope * (ranking.above + 1)
        value = (offset * ranking.harmonic_sums() / m + slope) * (ranking.grades > 0)
        return {self.key: value.sum(1) / own_relevance.sum(1)}


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
        if ranking.grades is None:
            return binary_ndcg(ranking, k)
        ideals = ranking.ideal_gains(int(k.max()))
        gained = (ranking.discounts(k) * (2.0**ranking.grades - 1)).sum(1)
        ideal = torch.zeros_like(gained)
        for level in range(ranking.levels):  # 2^l - 1 = 1 + 2 + ... + 2^(l-1), one term per shared level
            ideal += 2.0**level * ideals[(ranking.grades > level).sum(1).minimum(k)]
        return gained / ideal
