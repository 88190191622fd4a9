from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from dmlkit.losses.base import Loss
from dmlkit.manifolds import Poincare, Sphere
from dmlkit.manifolds.hyperbolic import Hyperbolic

Naive = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From unit embeddings (B, d), labels (B,) and unit proxies (C, ...) to the loss, by loops over single numbers."""


PAIR_LABELS = torch.tensor([0, 1, 0, 2, 1, 0, 3, 2, 1, 0, 3, 4])  # classes of 4, 3, 2, 2 and 1


def bend(space: Hyperbolic, curvature: float) -> None:
    """Set a learned curvature, as a step of an optimizer does."""
    space.geometry.k = torch.full_like(space.geometry.k, curvature if isinstance(space, Poincare) else -1 / curvature)


def value_and_gradient(function, x):
    leaf = x.clone().requires_grad_()
    value = function(leaf)
    return value.detach(), torch.autograd.grad(value, leaf)[0]


def mined(miner, x, labels):
    """The triplets (a, p, n) that a miner chooses of points on the sphere, whose rules are in contracts/test_miners."""
    alike = labels[:, None] == labels
    triplets = miner(Sphere(x.shape[1]).distance(x, x), alike.clone().fill_diagonal_(False), ~alike)
    found = []
    for a, p in triplets.keep.nonzero().tolist():
        negatives = range(len(labels)) if triplets.negative is None else [triplets.negative[a, p].item()]
        found += [(a, p, n) for n in negatives if labels[n] != labels[a]]
    return found


@pytest.fixture
def batch() -> tuple[Tensor, Tensor]:
    """Features (9, 5) and labels of 4 of 6 classes, in float64."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(9, 5, generator=generator, dtype=torch.float64), torch.tensor([0, 0, 3, 3, 3, 1, 5, 5, 0])


@pytest.fixture
def agree(batch: tuple[Tensor, Tensor]) -> Callable[[Loss, Naive], None]:
    """Checks value, gradients and finite differences of a loss on the sphere against loops."""

    def check(loss: Loss, naive: Naive) -> None:
        features, labels = batch
        features = features.clone().requires_grad_()
        (proxies,) = loss.parameters()
        unit_proxies = proxies / proxies.norm(dim=-1, keepdim=True)
        expected = naive(features / features.norm(dim=-1, keepdim=True), labels, unit_proxies)
        value = loss(loss.manifold.from_features(features), labels)
        torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-12)
        inputs = (features, proxies)
        expected_gradients = torch.autograd.grad(expected, inputs, allow_unused=True, materialize_grads=True)
        for retain in (True, False):  # a second backward pass through the same graph gives the same
            gradients = torch.autograd.grad(value * 3, inputs, retain_graph=retain)
            for gradient, other in zip(gradients, expected_gradients, strict=True):
                torch.testing.assert_close(gradient / 3, other, rtol=1e-6, atol=1e-10)
        torch.autograd.gradcheck(
            lambda features, proxies: torch.func.functional_call(
                loss, {"proxies": proxies}, (loss.manifold.from_features(features), labels)
            ),
            inputs,
            fast_mode=True,  # along one random direction: loops have been compared with each number above
        )

    return check


@pytest.fixture
def agree_with_peer(batch: tuple[Tensor, Tensor]) -> Callable[..., None]:
    """Checks value and gradients of a loss on the sphere against another library's loss with the same proxies."""

    def check(loss: Loss, peer: torch.nn.Module, peer_weight: Tensor, layout: Callable[[Tensor], Tensor]) -> None:
        """``layout`` turns our proxies, or their gradient, into the shape of ``peer_weight``."""
        features, labels = batch
        features = features.clone().requires_grad_()
        (proxies,) = loss.parameters()
        peer_weight.data.copy_(layout(proxies.data))
        value = loss(loss.manifold.from_features(features), labels)
        expected = peer(loss.manifold.from_features(features), labels)
        torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-9)
        gradient, proxy_gradient = torch.autograd.grad(value, (features, proxies))
        expected_gradients = torch.autograd.grad(expected, (features, peer_weight))
        torch.testing.assert_close((gradient, layout(proxy_gradient)), expected_gradients, rtol=1e-6, atol=1e-9)

    return check


@pytest.fixture
def pair_batch():
    """Twelve unit vectors in float64, five classes, one of them with a single image."""
    generator = torch.Generator().manual_seed(3)
    return normalize(torch.randn(12, 4, dtype=torch.float64, generator=generator), dim=1), PAIR_LABELS


@pytest.fixture
def assert_equals():
    """Compare two functions of embeddings: value and gradient, and the gradient with finite differences.

    They are given unit vectors and their gradient is taken before the division by the length: a loss on the sphere
    is free to write |x - y| as sqrt(2 - 2 x.y), which has another gradient along x.
    """

    def check(loss, oracle, embeddings, *, finite_differences=True, rtol=1e-9):
        found, expected = (
            value_and_gradient(lambda x, of=of: of(normalize(x, dim=1)), embeddings) for of in (loss, oracle)
        )
        assert expected[0] != 0
        torch.testing.assert_close(found, expected, rtol=rtol, atol=1e-12)
        if finite_differences:
            leaf = embeddings.clone().requires_grad_()
            assert torch.autograd.gradcheck(lambda x: loss(normalize(x, dim=1)), leaf, fast_mode=True)

    return check
