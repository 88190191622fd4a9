import pytest
import torch
from pytorch_metric_learning.distances import LpDistance
from pytorch_metric_learning.losses import MarginLoss

from dmlkit.losses import Margin
from dmlkit.manifolds import Euclidean, Sphere
from dmlkit.miners import All, DistanceWeighted, SemiHard
from tests.losses.conftest import mined


def naive(x, labels, triplets, margin, beta):
    terms = []
    for a, p, n in triplets:
        boundary = beta[labels[a]]
        terms.append(((x[a] - x[p]).norm() - boundary + margin).relu())
        terms.append((boundary - (x[a] - x[n]).norm() + margin).relu())
    return sum(terms) / sum(term > 0 for term in terms)


@pytest.mark.parametrize("kind", ["all", "semi_hard", "distance_weighted"])
def test_equals_the_loop_over_triplets(pair_batch, assert_equals, kind):
    x, labels = pair_batch
    sphere = Sphere(4)
    miner = {"all": All(), "semi_hard": SemiHard(), "distance_weighted": DistanceWeighted(sphere)}[kind]
    loss = Margin(sphere, num_classes=5, miner=miner).double()
    with torch.no_grad():
        loss.beta.copy_(torch.linspace(0.9, 1.3, 5))
    torch.manual_seed(0)
    chosen = mined(miner, x, labels)

    def ours(x):
        torch.manual_seed(0)
        return loss(x, labels)

    assert_equals(ours, lambda x: naive(x, labels, chosen, 0.2, loss.beta), x)
    (gradient,) = torch.autograd.grad(ours(x), loss.beta)
    (expected,) = torch.autograd.grad(naive(x, labels, chosen, 0.2, loss.beta), loss.beta)
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("per_class", [True, False])
def test_equals_pytorch_metric_learning(pair_batch, assert_equals, per_class):
    x, labels = pair_batch
    loss = Margin(Euclidean(4), 5, margin=0.3, beta=1.1, per_class=per_class, miner=All()).double()
    classes = 5 if per_class else None
    peer = MarginLoss(
        margin=0.3, beta=1.1, learn_beta=True, num_classes=classes, distance=LpDistance(normalize_embeddings=False)
    )
    peer.double()
    assert_equals(lambda x: loss(x, labels), lambda x: peer(x, labels), x, rtol=1e-6)
    (gradient,) = torch.autograd.grad(loss(x, labels), loss.beta)
    (expected,) = torch.autograd.grad(peer(x, labels), peer.beta)
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-9)


def test_boundary_is_a_constant_on_request():
    loss = Margin(Sphere(3), 4, learn_beta=False)
    assert not loss.beta.requires_grad
    assert "beta" in loss.state_dict()
