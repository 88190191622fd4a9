import pytest
from pytorch_metric_learning.losses import SupConLoss

from dmlkit.losses import SupCon
from dmlkit.manifolds import Sphere


def naive(x, labels, tau):
    rows, losses = range(len(x)), []
    for i in rows:
        positives = [p for p in rows if p != i and labels[p] == labels[i]]
        if positives:
            total = sum((x[i] @ x[a] / tau).exp() for a in rows if a != i)
            losses.append(-sum(((x[i] @ x[p] / tau).exp() / total).log() for p in positives) / len(positives))
    return sum(losses) / len(losses)


@pytest.mark.parametrize("tau", [0.1, 1.0])
def test_equals_the_double_loop(pair_batch, assert_equals, tau):
    x, labels = pair_batch
    loss = SupCon(Sphere(4), temperature=tau)
    assert_equals(lambda x: loss(x, labels), lambda x: naive(x, labels, tau), x)


def test_equals_pytorch_metric_learning(pair_batch, assert_equals):
    x, labels = pair_batch
    loss, peer = SupCon(Sphere(4), temperature=0.1), SupConLoss(0.1)
    assert_equals(lambda x: loss(x, labels), lambda x: peer(x, labels), x, rtol=1e-6)
