"""Circle loss: each similarity is weighted by its distance from its optimum."""

from collections.abc import Iterable

from pydantic import PositiveFloat
from torch import Tensor
from torch.nn.functional import softplus

from dmlkit.component import Requirement
from dmlkit.losses.pair_loss import PairLoss, Pairs, masked_logsumexp, masked_mean

REASON = "its optima 1 + m and -m assume a similarity that is at most 1, and 0 between unrelated points"


class Circle(PairLoss, name="circle"):
    r"""Circle (Sun et al. 2020): each pair is weighted by its distance from the optimal similarity.

    Sun et al., CVPR 2020 (arXiv:2002.10857), eq. 6, with the weights of eq. 5 and the optima of eq. 8; s = cosine.

    .. math:: \log\Big(1 + \sum_{n} e^{\gamma [s_n + m]_+ (s_n - m)}
            \sum_{p} e^{-\gamma [1 + m - s_p]_+ (s_p - 1 + m)}\Big)

    The weights in brackets count as constants in the gradient. The mean is over the anchors that have a positive and
    a negative.

    The paper uses m = 0.25 and gamma = 256 for faces, 0.25 and 128 for persons, 0.4 and 80 for fine-grained retrieval.

    Raises:
        ValueError: the manifold's similarity is not the cosine.

    Example:
        >>> import torch
        >>> from dmlkit.manifolds import Sphere
        >>> points = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
        >>> round(Circle(Sphere(2), scale=1)(points, torch.tensor([0, 0, 1])).item(), 4)  # log(1 + e^-0.32)
        0.5459
    """

    margin: PositiveFloat = 0.4
    """m, the relaxation, in cosine units."""
    scale: PositiveFloat = 80.0
    """gamma, the inverse temperature."""

    def requirements(self) -> Iterable[Requirement]:
        return (*super().requirements(), Requirement("manifold.similarity", ("cosine",), REASON))

    def compute_pairs(self, pairs: Pairs) -> Tensor:
        similarity = self.manifold.relative_similarity(pairs.rows, pairs.columns)  # (B, M)
        constant = similarity.detach()
        pull = (constant - 1 - self.margin).clamp(max=0) * (similarity - 1 + self.margin)
        push = (constant + self.margin).relu() * (similarity - self.margin)
        positives = masked_logsumexp(self.scale * pull, where=pairs.positive)  # (B,)
        negatives = masked_logsumexp(self.scale * push, where=pairs.negative)
        return masked_mean(softplus(positives + negatives), where=pairs.positive.any(1) & pairs.negative.any(1))
