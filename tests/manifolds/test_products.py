"""Inner products of a set with itself: value and both derivatives, by finite differences."""

import torch
from torch.autograd import gradcheck, gradgradcheck

from dmlkit.manifolds.products import inner_products


def test_inner_products_of_a_set_with_itself():
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, 5, dtype=torch.float64)  # not symmetric

    def weighted(x: torch.Tensor) -> torch.Tensor:
        return (weight * inner_products(x).sin()).sum()

    assert torch.equal(inner_products(x), x @ x.T)
    assert gradcheck(weighted, x) and gradgradcheck(weighted, x)
    separate = torch.autograd.grad((weight * (x @ x.T).sin()).sum(), x)[0]
    assert torch.allclose(torch.autograd.grad(weighted(x), x)[0], separate)
