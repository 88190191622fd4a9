"""Supervised contrastive loss: a softmax over the batch identifies every other image of a class."""

from pydantic import PositiveFloat
from torch import Tensor

from dmlkit.losses.pair_loss import PairLoss, Pairs, masked_logsumexp, masked_mean


class SupCon(PairLoss, name="sup_con"):
    r"""Supervised contrastive (Khosla et al. 2020): a softmax over all other images finds those of the same class.

    Khosla et al., NeurIPS 2020 (arXiv:2004.11362), eq. 2, the form with the sum outside the logarithm; s = relative
    similarity.

    .. math:: \frac{1}{|I|} \sum_{i \in I} \frac{-1}{|P_i|} \sum_{p \in P_i}
            \log \frac{e^{s_{ip} / \tau}}{\sum_{a \ne i} e^{s_{ia} / \tau}}

    I are the images with a positive and a negative in the batch; without any the loss is 0. The other positives of an
    image are in its denominator, unlike in `NPair` and `PairwiseCrossEntropy`. The paper compares two views of each
    image; here the images of a class take their place.

    Example:
        >>> import torch
        >>> from dmlkit.manifolds import Sphere
        >>> points = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
        >>> round(SupCon(Sphere(2), temperature=1.0)(points, torch.tensor([0, 0, 1])).item(), 4)  # log(1 + e^-1)
        0.3133
    """

    temperature: PositiveFloat = 0.1
    """tau, in similarity units (cosine on the sphere)."""

    def compute_pairs(self, pairs: Pairs) -> Tensor:
        logits = self.manifold.relative_similarity(pairs.rows, pairs.columns) / self.temperature  # (B, M)
        total = masked_logsumexp(logits, where=pairs.positive | pairs.negative)  # (B,)
        of_positives = (logits * pairs.positive).sum(1) / pairs.positive.sum(1).clamp(min=1)
        return masked_mean(total - of_positives, where=pairs.positive.any(1) & pairs.negative.any(1))
