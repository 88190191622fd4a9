import pytest

from dmlkit.losses import BinomialDeviance
from dmlkit.manifolds import Euclidean, Sphere


def naive(x, labels, alpha, beta, eta_positive, eta_negative):
    """CGML's eq. 7, its sum split into the two averages of Yi et al."""
    sums, counts = {True: 0, False: 0}, {True: 0, False: 0}
    for i in range(len(x)):
        for j in range(len(x)):
            if i != j:
                s = bool(labels[i] == labels[j])
                cosine = x[i] @ x[j] / (x[i].norm() * x[j].norm())
                eta = eta_positive if s else eta_negative
                sums[s] += (1 + (-(2 * s - 1) * alpha * (cosine - beta) * eta).exp()).log()
                counts[s] += 1
    return sums[True] / counts[True] + sums[False] / counts[False]


@pytest.mark.parametrize("settings", [(2.0, 0.5, 1.0, 25.0), (3.0, -0.2, 2.0, 5.0)])
@pytest.mark.parametrize("manifold", [Sphere(4), Euclidean(4, similarity="cosine")])
def test_equals_the_double_loop(pair_batch, assert_equals, manifold, settings):
    x, labels = pair_batch
    alpha, beta, positive_cost, negative_cost = settings
    loss = BinomialDeviance(
        manifold, scale=alpha, threshold=beta, positive_cost=positive_cost, negative_cost=negative_cost
    )
    length = 1 if isinstance(manifold, Sphere) else 3
    assert_equals(lambda x: loss(length * x, labels), lambda x: naive(x, labels, *settings), x)


def test_defaults_are_those_of_cgml():
    loss = BinomialDeviance(Sphere(2))
    assert (loss.scale, loss.threshold, loss.positive_cost, loss.negative_cost) == (2, 0.5, 1, 25)
