import pytest
import torch
from torch.nn.functional import normalize

from dmlkit.manifolds.products import Cosines, unit_vectors


def features() -> torch.Tensor:
    """Of every length: zero, below and above epsilon."""
    lengths = torch.tensor([0.0, 1e-9, 1e-5, 1.0, 1e4], dtype=torch.float64)
    directions = torch.randn(5, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (directions * lengths[:, None]).requires_grad_()


def test_value_and_gradient_are_those_of_normalize():
    x = features()
    weights = torch.randn(5, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    values = [unit_vectors(x), normalize(x, dim=-1, eps=1e-6)]
    gradients = [torch.autograd.grad(value, x, weights)[0] for value in values]
    torch.testing.assert_close(values[0], values[1], rtol=1e-14, atol=0)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-9, atol=1e-9)


def test_finite_differences_of_the_gradient_and_of_its_gradient():
    x = features()[3:].detach().requires_grad_()
    torch.autograd.gradcheck(unit_vectors, x)
    torch.autograd.gradgradcheck(unit_vectors, x)


@pytest.mark.parametrize("shape", [(7,), (2, 3, 7)])
def test_any_leading_shape_and_vmap(shape: tuple[int, ...]):
    x = torch.randn(shape, requires_grad=True)
    torch.testing.assert_close(unit_vectors(x), normalize(x, dim=-1))
    stack = torch.stack([x, 2 * x])
    torch.testing.assert_close(torch.func.vmap(unit_vectors)(stack), normalize(stack, dim=-1))


@pytest.mark.parametrize("length", [1.0, 1e-3, 1e-8, 0.0, 1e6])
def test_cosines_and_their_gradients_are_those_with_normalized_vectors(length: float):
    torch.manual_seed(0)
    x, vectors = (torch.randn(n, 5, dtype=torch.float64) for n in (4, 7))
    vectors[:3] *= length
    weights = torch.randn(4, 7, dtype=torch.float64)
    cosines = Cosines(x.requires_grad_(), vectors.requires_grad_())
    assert not cosines.values.requires_grad  # it builds no graph
    of_vectors = torch.empty_like(vectors)
    values = cosines.values.clone()
    of_x = cosines.pull_back(weights, of_vectors)
    expected = x @ normalize(vectors, dim=1, eps=1e-6).T
    torch.testing.assert_close(values, expected.detach())
    gradients = torch.autograd.grad((expected * weights).sum(), (x, vectors))
    torch.testing.assert_close((of_x, of_vectors), gradients, rtol=1e-9, atol=1e-9)
