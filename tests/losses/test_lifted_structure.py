import pytest
import torch
from pytorch_metric_learning.distances import LpDistance
from pytorch_metric_learning.losses import LiftedStructureLoss

from dmlkit.losses import LiftedStructure
from dmlkit.manifolds import Euclidean, Sphere


def naive(x, labels, margin):
    terms = []
    rows = range(len(x))
    for i in rows:
        for j in range(i + 1, len(x)):
            if labels[i] == labels[j]:
                ends = [(end, k) for end in (i, j) for k in rows if labels[k] != labels[end]]
                total = sum((margin - (x[end] - x[k]).norm()).exp() for end, k in ends)
                terms.append((total.log() + (x[i] - x[j]).norm()).relu() ** 2)
    return sum(terms) / (2 * len(terms))


@pytest.mark.parametrize("margin", [1.0, 0.2, 0.0])
def test_equals_the_double_loop(pair_batch, assert_equals, margin):
    x, labels = pair_batch
    loss = LiftedStructure(Sphere(4), margin=margin)
    assert_equals(lambda x: loss(x, labels), lambda x: naive(x, labels, margin), x)


def test_equals_pytorch_metric_learning(pair_batch, assert_equals):
    x, labels = pair_batch
    loss = LiftedStructure(Euclidean(4), margin=0.5)
    peer = LiftedStructureLoss(neg_margin=0.5, distance=LpDistance(normalize_embeddings=False))
    assert_equals(lambda x: loss(2 * x, labels), lambda x: peer(2 * x, labels), x, rtol=1e-6)


def test_one_class_has_no_negatives_and_no_loss():
    x = torch.randn(5, 3, requires_grad=True)
    value = LiftedStructure(Euclidean(3))(x, torch.zeros(5, dtype=torch.long))
    value.backward()
    assert value == 0
    assert x.grad.abs().max() == 0
