"""FastAP: average precision from histograms of the distances to positives and to all images."""

from collections.abc import Iterable

import torch
from pydantic import PositiveInt
from torch import Tensor

from dmlkit.component import Requirement
from dmlkit.losses.pair_loss import PairLoss, Pairs, masked_mean


class FastAP(PairLoss, name="fast_ap"):
    r"""FastAP (Cakir et al. 2019): one minus the average precision of distances that are rounded to a few bins.

    Cakir et al., CVPR 2019, section 3; z_1 .. z_{L+1} divide the squared chords |x - y|^2 = 2 - 2 s of the unit
    sphere, 0 to 4, into L equal parts, and each pair is shared by the two nearest of them (s = similarity).

    .. math:: 1 - \frac{1}{N_q^+} \sum_j \frac{h_j^+ H_j^+}{H_j}

    h_j+ is the number of positives at z_j, H_j+ and H_j those of positives and of all pairs up to z_j, N_q+ that of
    the positives of an image. The mean is over the images with a positive and a negative.

    Raises:
        ValueError: the manifold's similarity is not a cosine.

    Example:
        >>> from dmlkit.manifolds import Sphere
        >>> points = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
        >>> loss = FastAP(Sphere(2), bins=2)  # bins at 0, 2 and 4
        >>> round(loss(points, torch.tensor([0, 0, 1])).item(), 4)  # of 1: AP = 1; of 2: both at 2, AP = 1 / 2
        0.25
    """

    bins: PositiveInt = 10
    """L, the number of parts into which the distances are divided."""

    def requirements(self) -> Iterable[Requirement]:
        yield from super().requirements()
        yield Requirement("manifold.similarity", ("cosine", "origin_cosine"), "its bins divide the chords of a sphere")

    def compute_pairs(self, pairs: Pairs) -> Tensor:
        similarity = self.manifold.relative_similarity(pairs.rows, pairs.columns)  # (B, M)
        place = (1 - similarity).clamp(0, 2) * (self.bins / 2)  # of the squared chord among the z, in bins
        lower = place.detach().long().clamp(max=self.bins - 1)
        share = place - lower  # of the upper of two bins
        positive, negative = (self._histogram(lower, share, kind) for kind in (pairs.positive, pairs.negative))
        up_to = positive.cumsum(1)  # (B, L + 1)
        precision = up_to / (up_to + negative.cumsum(1)).clamp(min=torch.finfo(share.dtype).tiny)
        average = (positive * precision).sum(1) / pairs.positive.sum(1).clamp(min=1)
        return masked_mean(1 - average, where=pairs.positive.any(1) & pairs.negative.any(1))

    def _histogram(self, lower: Tensor, share: Tensor, counted: Tensor) -> Tensor:
        """Count the pairs kept by ``counted`` at each z: (B, L + 1)."""
        empty = share.new_zeros(len(share), self.bins + 1)
        return empty.scatter_add(1, lower, (1 - share) * counted).scatter_add(1, lower + 1, share * counted)
