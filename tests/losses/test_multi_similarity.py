import pytest
import torch
from pytorch_metric_learning.losses import MultiSimilarityLoss
from pytorch_metric_learning.miners import MultiSimilarityMiner

from dmlkit.losses import MultiSimilarity
from dmlkit.manifolds import Sphere


def naive(x, labels, alpha, beta, base, epsilon):
    total = 0
    rows = range(len(x))
    for i in rows:
        positives = [x[i] @ x[k] for k in rows if k != i and labels[k] == labels[i]]
        negatives = [x[i] @ x[k] for k in rows if labels[k] != labels[i]]
        if epsilon is not None:
            low, high = min(positives, default=torch.inf), max(negatives, default=-torch.inf)
            positives = [s for s in positives if s < high + epsilon]
            negatives = [s for s in negatives if s > low - epsilon]
        total += (1 + sum((-alpha * (s - base)).exp() for s in positives) + x.sum() * 0).log() / alpha
        total += (1 + sum((beta * (s - base)).exp() for s in negatives) + x.sum() * 0).log() / beta
    return total / len(x)


@pytest.mark.parametrize("epsilon", [None, 0.1, 0.0])
@pytest.mark.parametrize(("alpha", "beta", "base"), [(2.0, 50.0, 0.5), (5.0, 3.0, 1.0)])
def test_equals_the_double_loop(pair_batch, assert_equals, alpha, beta, base, epsilon):
    x, labels = pair_batch
    loss = MultiSimilarity(Sphere(4), positive_scale=alpha, negative_scale=beta, threshold=base, mining_margin=epsilon)
    assert_equals(lambda x: loss(x, labels), lambda x: naive(x, labels, alpha, beta, base, epsilon), x)


@pytest.mark.parametrize("mined", [True, False])
def test_equals_pytorch_metric_learning(pair_batch, assert_equals, mined):
    x, labels = pair_batch
    loss = MultiSimilarity(Sphere(4), mining_margin=0.1 if mined else None)
    peer, miner = MultiSimilarityLoss(2, 50, 0.5), MultiSimilarityMiner(0.1)
    assert_equals(
        lambda x: loss(x, labels),
        lambda x: peer(x, labels, miner(x.detach(), labels) if mined else None),
        x,
        rtol=1e-6,
    )
