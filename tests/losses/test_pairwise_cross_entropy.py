from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from dmlkit.losses import PairwiseCrossEntropy
from dmlkit.manifolds import Euclidean, Poincare, Sphere


def naive(points: Tensor, labels: Tensor, similarity: Callable[[Tensor, Tensor], Tensor], tau: float) -> Tensor:
    terms: list[Tensor] = []
    for i in range(len(points)):
        for j in range(len(points)):
            if i != j and labels[i] == labels[j]:
                own = (similarity(points[i], points[j]) / tau).exp()
                others = [k for k in range(len(points)) if labels[k] != labels[i]]
                total = own + sum((similarity(points[i], points[k]) / tau).exp() for k in others)
                terms.append(-(own / total).log())
    return torch.stack(terms).mean()


def ball_distance(x: Tensor, y: Tensor, c: float) -> Tensor:
    """Ermolov et al., eq. 1 and 2: 2 / sqrt(c) artanh(sqrt(c) |-x (+) y|)."""
    dot, x_squared, y_squared = -(x @ y), x @ x, y @ y
    total = (1 + 2 * c * dot + c * y_squared) * -x + (1 - c * x_squared) * y
    total = total / (1 + 2 * c * dot + c * c * x_squared * y_squared)
    return 2 / c**0.5 * (c**0.5 * total.norm()).atanh()


@pytest.mark.parametrize(
    ("manifold", "similarity", "tau"),
    [
        (Poincare(4, curvature=-0.125), lambda x, y: -ball_distance(x, y, 0.125), 0.2),
        (Sphere(4), lambda x, y: x @ y, 1.0),
        (Euclidean(4), lambda x, y: -(x - y).norm(), 0.2),
    ],
)
def test_equals_the_double_loop(pair_batch, assert_equals, manifold, similarity, tau):
    x, labels = pair_batch
    loss, places = PairwiseCrossEntropy(manifold.double(), temperature=tau), manifold.from_features
    # torch's softplus is linear above 20, which is off by e^-20 = 2e-9.
    assert_equals(lambda x: loss(places(x), labels), lambda x: naive(places(x), labels, similarity, tau), x, rtol=1e-7)


def authors_code(first: Tensor, second: Tensor, similarity: Callable[[Tensor, Tensor], Tensor], tau: float) -> Tensor:
    """contrastive_loss of hyp_metric's train.py, of one direction; its caller adds up both."""
    count = len(first)
    to_own = similarity(first, first) / tau - torch.eye(count, dtype=first.dtype) * 1e9
    logits = torch.cat([similarity(first, second) / tau, to_own], dim=1)
    logits = logits - logits.max(1, keepdim=True)[0].detach()
    return cross_entropy(logits, torch.arange(count))


def test_two_images_a_class_give_half_the_authors_sum_of_both_directions():
    ball = Poincare(5, curvature=-0.125).double()
    generator = torch.Generator().manual_seed(0)
    first, second = ball.from_features(torch.randn(2, 7, 5, generator=generator, dtype=torch.float64))
    one_way = partial(authors_code, similarity=ball.similarity, tau=0.2)
    value = PairwiseCrossEntropy(ball)(torch.cat([first, second]), torch.arange(7).repeat(2))
    torch.testing.assert_close(2 * value, one_way(first, second) + one_way(second, first), rtol=1e-9, atol=0)
