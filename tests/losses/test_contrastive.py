import pytest
import torch
from pytorch_metric_learning.distances import LpDistance
from pytorch_metric_learning.losses import ContrastiveLoss

from dmlkit.losses import Contrastive
from dmlkit.manifolds import Euclidean, Sphere


def naive(x, labels, positive_margin, negative_margin, power):
    pull, push = [], []
    for i in range(len(x)):
        for j in range(len(x)):
            if i == j:
                continue
            distance = (x[i] - x[j]).norm()
            if labels[i] == labels[j] and distance > positive_margin:
                pull.append((distance - positive_margin) ** power)
            if labels[i] != labels[j] and distance < negative_margin:
                push.append((negative_margin - distance) ** power)
    return sum(pull) / max(1, len(pull)) + sum(push) / max(1, len(push))


@pytest.mark.parametrize(("squared", "positive_margin", "negative_margin"), [(True, 0, 1), (False, 0.9, 1.2)])
def test_equals_the_double_loop(pair_batch, assert_equals, squared, positive_margin, negative_margin):
    x, labels = pair_batch
    loss = Contrastive(Sphere(4), positive_margin=positive_margin, negative_margin=negative_margin, squared=squared)
    power = 2 if squared else 1
    assert_equals(lambda x: loss(x, labels), lambda x: naive(x, labels, positive_margin, negative_margin, power), x)


def test_equals_pytorch_metric_learning(pair_batch, assert_equals):
    x, labels = pair_batch
    loss = Contrastive(Euclidean(4), positive_margin=0.5, negative_margin=1.3, squared=False)
    peer = ContrastiveLoss(0.5, 1.3, distance=LpDistance(normalize_embeddings=False))
    assert_equals(lambda x: loss(2 * x, labels), lambda x: peer(2 * x, labels), x, rtol=1e-6)


def test_pairs_that_rest_give_zero_with_a_zero_gradient():
    x = torch.tensor([[0.0], [0.0], [5.0]], requires_grad=True)
    value = Contrastive(Euclidean(1))(x, torch.tensor([0, 0, 1]))
    value.backward()
    assert value == 0
    assert x.grad.abs().max() == 0
