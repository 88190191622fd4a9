"""Inner products and squared distances as matrix products, with rounding errors set to 0."""

from typing import Any

import torch
from torch import Tensor
from torch.linalg import vecdot


def squared_distances(x: Tensor, y: Tensor) -> Tensor:
    """Compute |x_i - y_j|^2 of x (N, D) and y (M, D) from one matrix product: (N, M), never (N, M, D).

    Example:
        >>> x = torch.randn(5, 512) * 30
        >>> squared_distances(x, x).diagonal().tolist()
        [0.0, 0.0, 0.0, 0.0, 0.0]
    """
    if x is y:
        squares = vecdot(x, x)
        scale = squares[..., :, None] + squares[..., None, :]
        return drop_rounding(scale - 2 * inner_products(x), scale)
    scale = x.square().sum(-1, keepdim=True) + y.square().sum(-1)  # (N, M)
    return drop_rounding(torch.addmm(scale, x, y.T, alpha=-2), scale)


def inner_products(x: Tensor, y: Tensor | None = None) -> Tensor:
    """Compute <x_i, y_j> of x (N, D) and y (M, D): (N, M). Without y, y = x, which saves a product in backward."""
    if y is not None:
        return x @ y.T
    gram: Any = _Gram.apply  # untyped in torch
    return gram(x)


class _Gram(torch.autograd.Function):
    """x x^T, whose gradient (G + G^T) x takes one matrix product; autograd takes two."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(x)
        return x @ x.mT

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return (grad + grad.mT) @ ctx.saved_tensors[0]


def drop_rounding(difference: Tensor, scale: Tensor) -> Tensor:
    """Set a difference of sums to 0 where it is below its rounding error; ``scale`` is the sum of the terms.

    |x|^2 + |y|^2 - 2 x.y cancels if x and y are close: such entries become 0 with a zero gradient, so that
    d(x, x) = 0 (``torch.cdist`` leaves 8e-4 in float32).
    """
    return difference.masked_fill(difference < rounding_error(difference) * scale.detach(), 0)


def rounding_error(x: Tensor) -> float:
    """Return the relative error of a sum of products: 8 ulp; measured at most 5 ulp for 4 096 terms."""
    return 8 * torch.finfo(x.dtype).eps


def safe_sqrt(x: Tensor) -> Tensor:
    """Compute sqrt(x) for x >= 0 with gradient 0 instead of infinity at 0.

    Example:
        >>> x = torch.zeros(1, requires_grad=True)
        >>> safe_sqrt(x).backward(); x.grad.item()
        0.0
    """
    positive = x > 0
    return torch.where(positive, x, 1).sqrt() * positive
