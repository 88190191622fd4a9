"""Unit vectors with a gradient in closed form."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import normalize


def unit_vectors(x: Tensor, epsilon: float = 1e-6) -> Tensor:
    """x / |x| along the last dimension. A zero vector stays zero; below |x| = epsilon it is x / epsilon.

    The same as ``normalize``, whose gradient takes a third of a proxy loss's step: it walks 11 times over the
    proxies where the closed form (g - y <g, y>) / |x| takes 4 walks (B=180, C=11 318, d=512).

    Example:
        >>> unit_vectors(torch.tensor([[3.0, 4.0], [0.0, 0.0]])).tolist()
        [[0.6000000238418579, 0.800000011920929], [0.0, 0.0]]
    """
    learns = x.requires_grad and torch.is_grad_enabled()
    traced = torch.compiler.is_compiling() or torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]
    if traced or not learns:  # exporters know normalize
        return normalize(x, dim=-1, eps=epsilon)
    return _UnitVectors.apply(x, epsilon)[0]


class _UnitVectors(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x / norm.clamp(min=epsilon), norm

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, ctx.epsilon = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(x, *output)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        gradient, _ = grad_outputs
        x, unit, norm = ctx.saved_tensors
        if torch.is_grad_enabled():  # for a gradient of the gradient
            unit = normalize(x, dim=-1, eps=ctx.epsilon)
            return torch.autograd.grad(unit, x, gradient, create_graph=True)[0], None
        along = torch.linalg.vecdot(gradient, unit)[..., None].masked_fill_(norm < ctx.epsilon, 0)
        return torch.addcmul(gradient, unit, along, value=-1).div_(norm.clamp(min=ctx.epsilon)), None


def cosines(x: Tensor, vectors: Tensor, epsilon: float = 1e-6) -> Tensor:
    """<x_i, v_j / |v_j|> of x (N, d) and vectors (M, d): (N, M), without M unit vectors.

    The same as ``x @ unit_vectors(vectors).T``, which walks 7 times over the vectors where this takes 4.

    Example:
        >>> cosines(torch.tensor([[1.0, 0.0]]), torch.tensor([[3.0, 4.0], [0.0, 0.0]])).tolist()
        [[0.6000000238418579, 0.0]]
    """
    return _Cosines.apply(x, vectors, epsilon)


class _Cosines(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, vectors: Tensor, epsilon: float) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        norm = torch.linalg.vector_norm(vectors, dim=-1)
        inverse = norm.clamp(min=epsilon).reciprocal_()
        found = (x @ vectors.T).mul_(inverse)
        ctx.save_for_backward(x, vectors, inverse.square().masked_fill_(norm < epsilon, 0), inverse, found)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, vectors, square, inverse, found = ctx.saved_tensors
        along = torch.linalg.vecdot(grad_outputs[0], found, dim=0).mul_(square)
        gradient = grad_outputs[0] * inverse
        return gradient @ vectors, (gradient.T @ x).addcmul_(vectors, along[:, None], value=-1), None
