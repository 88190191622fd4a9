import pytest
import torch
from pytorch_metric_learning.losses import NPairsLoss

from dmlkit.losses import NPair
from dmlkit.losses.pair_loss import Pairs
from dmlkit.manifolds import Euclidean, Sphere


def naive(x, labels, scale):
    terms = []
    rows = range(len(x))
    for i in rows:
        for p in rows:
            if p != i and labels[p] == labels[i]:
                others = [(scale * (x[i] @ x[j] - x[i] @ x[p])).exp() for j in rows if labels[j] != labels[i]]
                terms.append((1 + sum(others)).log())
    return sum(terms) / len(terms)


@pytest.mark.parametrize("scale", [1.0, 16.0])
@pytest.mark.parametrize(("manifold", "length"), [(Sphere(4), 1), (Euclidean(4, similarity="dot"), 3)])
def test_equals_the_triple_loop(pair_batch, assert_equals, manifold, length, scale):
    x, labels = pair_batch
    loss = NPair(manifold, scale=scale)
    # torch's softplus is linear above 20, which is off by e^-20 = 2e-9.
    assert_equals(lambda x: loss(length * x, labels), lambda x: naive(length * x, labels, scale), x, rtol=1e-7)


def test_anchors_against_positives_equal_pytorch_metric_learning(assert_equals):
    """Sohn's form has one positive a class as columns; that is another set of pairs, not another loss."""
    x = torch.randn(8, 3, dtype=torch.float64)
    labels = torch.arange(8) // 2
    alike = torch.eye(4, dtype=torch.bool)
    loss = NPair(Euclidean(3, similarity="dot"))

    def ours(x):
        return loss.compute_pairs(Pairs(x[::2], x[1::2], labels[::2], alike, ~alike))

    from pytorch_metric_learning.distances import DotProductSimilarity

    peer = NPairsLoss(distance=DotProductSimilarity(normalize_embeddings=False))
    assert_equals(ours, lambda x: peer(x, labels), x, rtol=1e-6)
