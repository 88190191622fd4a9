"""Pairwise cross-entropy: a softmax over the batch identifies another image of the same class, by distance."""

from pydantic import PositiveFloat
from torch import Tensor
from torch.nn.functional import softplus

from dmlkit.losses.pair_loss import PairLoss, Pairs, masked_logsumexp, masked_mean


class PairwiseCrossEntropy(PairLoss, name="pairwise_cross_entropy"):
    r"""Pairwise cross-entropy (Ermolov et al. 2022, Hyp-ViT): a softmax over negative distances finds the positive.

    Ermolov et al., CVPR 2022 (arXiv:2203.10833), eq. 6; s = the manifold's similarity, in the paper -d.

    .. math:: \frac{1}{|P|} \sum_{(i, j) \in P} -\log
            \frac{e^{s_{ij} / \tau}}{e^{s_{ij} / \tau} + \sum_{y_k \ne y_i} e^{s_{ik} / \tau}}

    P are all positive pairs in both directions, (i, j) and (j, i). With two images per class, the paper's batch, the
    denominator is the sum over all images except i. The authors' code sums both directions, which is twice this value.
    With more images per class, the other positives are left out of the denominator, as in the authors' code. The code
    uses two images per class as negatives; here all images of other classes are negatives.

    The loss equals `NPair` with scale 1 / tau, except that it uses the similarity itself instead of the relative
    similarity, so tau is in the paper's units.

    Example:
        >>> import torch
        >>> from dmlkit.manifolds import Euclidean
        >>> points = torch.tensor([[0.0], [0.0], [1.0]])
        >>> loss = PairwiseCrossEntropy(Euclidean(1), temperature=1.0)
        >>> round(loss(points, torch.tensor([0, 0, 1])).item(), 4)  # log(1 + e^-1)
        0.3133
    """

    temperature: PositiveFloat = 0.2
    """tau, in units of the manifold's similarity: a distance; 0.1 in the paper for the cosine on the sphere."""

    def compute_pairs(self, pairs: Pairs) -> Tensor:
        logits = self.manifold.similarity(pairs.rows, pairs.columns) / self.temperature  # (B, M)
        negatives = masked_logsumexp(logits, where=pairs.negative)  # (B,)
        return masked_mean(softplus(negatives[:, None] - logits), where=pairs.positive)
