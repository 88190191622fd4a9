import pytest
from pytorch_metric_learning.losses import CircleLoss

from dmlkit.losses import Circle
from dmlkit.manifolds import Sphere


def naive(x, labels, m, gamma):
    terms = []
    rows = range(len(x))
    for i in rows:
        positives = [x[i] @ x[k] for k in rows if k != i and labels[k] == labels[i]]
        negatives = [x[i] @ x[k] for k in rows if labels[k] != labels[i]]
        if positives and negatives:
            push = sum((gamma * (s.detach() + m).relu() * (s - m)).exp() for s in negatives)
            pull = sum((-gamma * (1 + m - s.detach()).relu() * (s - (1 - m))).exp() for s in positives)
            terms.append((1 + push * pull).log())
    return sum(terms) / len(terms)


@pytest.mark.parametrize(("m", "gamma"), [(0.4, 80.0), (0.25, 4.0)])
def test_equals_the_double_loop(pair_batch, assert_equals, m, gamma):
    x, labels = pair_batch
    loss = Circle(Sphere(4), margin=m, scale=gamma)
    # No finite differences: the weights are constants for the gradient, and not for the value.
    assert_equals(lambda x: loss(x, labels), lambda x: naive(x, labels, m, gamma), x, finite_differences=False)


def test_equals_pytorch_metric_learning(pair_batch, assert_equals):
    x, labels = pair_batch
    loss, peer = Circle(Sphere(4)), CircleLoss(m=0.4, gamma=80)
    assert_equals(lambda x: loss(x, labels), lambda x: peer(x, labels), x, finite_differences=False, rtol=1e-6)
