import pytest
import torch
from torch.nn.functional import normalize

LABELS = torch.tensor([0, 1, 0, 2, 1, 0, 3, 2, 1, 0, 3, 4])  # classes of 4, 3, 2, 2 and 1


@pytest.fixture
def pair_batch():
    """Twelve unit vectors in float64, five classes, one of them with a single image."""
    generator = torch.Generator().manual_seed(3)
    return normalize(torch.randn(12, 4, dtype=torch.float64, generator=generator), dim=1), LABELS


@pytest.fixture
def assert_equals():
    """Compare two functions of embeddings: value and gradient, and the gradient with finite differences.

    They are given unit vectors and their gradient is taken before the division by the length: a loss on the sphere
    is free to write |x - y| as sqrt(2 - 2 x.y), which has another gradient along x.
    """

    def check(loss, oracle, embeddings, *, finite_differences=True, rtol=1e-9):
        results = []
        for function in (loss, oracle):
            leaf = embeddings.clone().requires_grad_()
            value = function(normalize(leaf, dim=1))
            (gradient,) = torch.autograd.grad(value, leaf)
            results.append((value.detach(), gradient))
        (value, gradient), (expected_value, expected_gradient) = results
        assert expected_value != 0
        torch.testing.assert_close(value, expected_value, rtol=rtol, atol=1e-12)
        torch.testing.assert_close(gradient, expected_gradient, rtol=rtol, atol=1e-12)
        if finite_differences:
            assert torch.autograd.gradcheck(lambda x: loss(normalize(x, dim=1)), embeddings.clone().requires_grad_())

    return check
