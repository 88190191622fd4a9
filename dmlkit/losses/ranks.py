"""Losses on differentiable ranks: Smooth-AP, ROADMAP and the recall@k surrogate, and the ranks of the positives."""

from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor
from torch.autograd.function import once_differentiable

from dmlkit.component import Requirement
from dmlkit.losses.base import NEEDS_BOUNDED
from dmlkit.losses.pair_loss import PairLoss, Pairs

CHUNK = 2**21  # comparisons computed at once: 8 MB per float32 matrix
DENSE = 2**25  # comparisons up to which a GPU computes them all instead of waiting for the list of positives

Step = Callable[[Tensor], Tensor]
"""Counts a column by how much more similar it is than a positive: 0 far below, 1 far above; 0 for -inf."""


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
            found = ranks.sum_of_queries(torch.sigmoid((k - rank) / self.rank_temperature))
            missed = missed + (1 - found / positives.clamp(min=1, max=k)).relu()
        return ranks.mean(missed / len(self.at))


def mix_similarities(similarity: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Add V virtual images, one for each pair of a class within the batch, to the similarities and pairs (B, M).

    Returns:
        The three matrices (B + V, M + V). The virtual images are the last V rows and columns.

    Example:
        >>> similarity = torch.tensor([[1.0, 0.0, 0.4], [0.0, 1.0, 0.8], [0.4, 0.8, 1.0]])
        >>> same = torch.tensor([[0, 1, 0], [1, 0, 0], [0, 0, 0]], dtype=torch.bool)
        >>> mixed, positive, negative = mix_similarities(similarity, same, ~(same | torch.eye(3).bool()))
        >>> bool(0.4 <= mixed[3, 2] <= 0.8), positive[3].tolist(), negative[3].tolist()
        (True, [True, True, False, False], [False, False, True, False])
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


class PositiveRanks:
    """Queries, the rows of a batch, with all columns ordered by their similarity to each.

    The rank of a positive needs its comparison with every column: P M numbers for P positive pairs, where comparing
    all columns with each other would take B M^2. They are computed `CHUNK` at a time, and again in the backward pass.
    On a GPU the list of positive pairs is the only value for which a step waits; batches below 2^25 comparisons, 322
    images, do without it.

    Args:
        similarity: (B, M).
        positive: (B, M) bool.
        negative: (B, M) bool; a column that is neither is not ranked.

    Example:
        >>> positive = torch.tensor([[False, True, False], [True, False, False], [False, False, False]])
        >>> negative = torch.tensor([[False, False, True], [False, False, True], [True, True, False]])
        >>> similarity = torch.tensor([[1.0, 0.2, 0.6], [0.2, 1.0, 0.1], [0.6, 0.1, 1.0]])
        >>> PositiveRanks(similarity, positive, negative).count(negative, lambda excess: (excess > 0).float()).tolist()
        [1.0, 0.0]
    """

    def __init__(self, similarity: Tensor, positive: Tensor, negative: Tensor) -> None:
        self.similarity, self.positive, self.negative = similarity, positive, negative
        columns = similarity.shape[1]
        if may_list(positive):
            self.row, self.column = positive.nonzero(as_tuple=True)
        else:
            cells = torch.arange(positive.numel(), device=positive.device)
            self.row, self.column = cells // columns, cells % columns
        self.own = similarity[self.row, self.column]  # (P,)
        self.counted = positive.any(1) & negative.any(1)  # (B,), the queries that have something to order

    def count(self, among: Tensor, step: Step) -> Tensor:
        """Count, for each positive pair, the columns above the positive: (P,), differentiable once.

        Args:
            among: (B, M) bool, the columns to count. The positive itself adds step(0) if it is among them.
            step: the differentiable count of one column.
        """
        count: Any = _Count.apply  # untyped in torch
        return count(self.similarity.masked_fill(~among, -torch.inf), self.own, self.row, step)

    def sum_of_queries(self, values: Tensor) -> Tensor:
        """Sum values (P,) of positive pairs for each query: (B,)."""
        kept = values * self.positive[self.row, self.column]
        return values.new_zeros(len(self.positive)).index_add(0, self.row, kept)

    def mean(self, values: Tensor) -> Tensor:
        """Average values (B,) over the queries that have a positive and a negative; 0 if there is none."""
        return (values * self.counted).sum() / self.counted.sum().clamp(min=1)


def may_list(positive: Tensor) -> bool:
    """Return whether to list the positives of (B, M) pairs, rather than compute all pairs without waiting."""
    return positive.is_cpu or positive.numel() * positive.shape[1] > DENSE


class _Count(torch.autograd.Function):
    """Sum of steps over the columns of a row, for each positive pair; the backward pass computes the steps again."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, own: Tensor, row: Tensor, step: Step) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(scores, own, row)
        ctx.step = step
        counts = torch.empty_like(own)
        for excess, pairs in _chunks(scores, own, row):
            counts[pairs] = step(excess).sum(1)
        return counts

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        scores, own, row = ctx.saved_tensors
        of_scores, of_own = torch.zeros_like(scores), torch.empty_like(own)
        for excess, pairs in _chunks(scores, own, row):
            with torch.enable_grad():
                value = ctx.step(excess.requires_grad_())
            (slope,) = torch.autograd.grad(value, excess, grad_outputs[0][pairs, None].expand_as(value))
            of_scores.index_add_(0, row[pairs], slope)
            of_own[pairs] = -slope.sum(1)
        return of_scores, of_own, None, None


def _chunks(scores: Tensor, own: Tensor, row: Tensor) -> Iterator[tuple[Tensor, slice]]:
    """Yield the excess of all columns over the positives (n, M) of a slice of the pairs, which it yields too."""
    size = max(1, CHUNK // scores.shape[1])
    for start in range(0, len(row), size):
        pairs = slice(start, start + size)
        yield scores.index_select(0, row[pairs]).sub_(own[pairs, None]), pairs
