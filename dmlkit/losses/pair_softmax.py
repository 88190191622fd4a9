"""Softmax losses over the images of a batch, which identify the other images of a class."""

from pydantic import PositiveFloat
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

from dmlkit.losses.pair_loss import PairLoss, Pairs, masked_logsumexp, masked_mean


class NPair(PairLoss, name="n_pair"):
    r"""N-pair (Sohn 2016): a softmax of each positive against all the negatives of its anchor.

    Sohn, NIPS 2016, eq. 7, over a whole batch as in Chen et al., AAAI 2021 (CGML), eq. 6; s = relative
    similarity.

    .. math:: \frac{1}{|P|} \sum_{(i, p) \in P} \log(1 + \sum_{y_j \ne y_i} e^{\alpha (s_{ij} - s_{ip})})

    P are all positive pairs. With two images per class this is the papers' one positive per anchor; here the loss is
    the mean over anchors, where CGML takes the sum. Use ``Euclidean(d, similarity="dot")`` for embeddings that are not
    normalized, as in both papers. On the sphere, a scale of about 10 lets the softmax reach small losses.

    Example:
        >>> import torch
        >>> from dmlkit.manifolds import Euclidean
        >>> points = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
        >>> round(NPair(Euclidean(2, similarity="dot"))(points, torch.tensor([0, 0, 1])).item(), 4)  # log(1 + e^-1)
        0.3133
    """

    scale: PositiveFloat = 1.0
    """Inverse temperature; 1 in the paper, which does not normalize embeddings."""

    def compute_pairs(self, pairs: Pairs) -> Tensor:
        similarity = self.scale * self.manifold.relative_similarity(pairs.rows, pairs.columns)  # (B, M)
        negatives = masked_logsumexp(similarity, where=pairs.negative)  # (B,)
        # log(1 + e^x) = -logsigmoid(-x), whose kernel is vectorized, unlike that of softplus: saves 0.06 of 1.7 ms
        return -masked_mean(logsigmoid(similarity - negatives[:, None]), where=pairs.positive)


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
