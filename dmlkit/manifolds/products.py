"""Inner products, unit vectors and vectors of bounded length, without needless copies and in full precision."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.linalg import vecdot
from torch.nn.functional import normalize

BLOCK_ENTRIES = 2**26  # products held at once: 256 MB in float32
EPSILON = 1e-6  # length below which a vector is not normalized but divided by this
BLOCK_ROWS = 1024  # more rows do not make the product faster (166 GFLOP/s on 2 cores; 128 at 256 rows)


def squared_distances(x: Tensor, y: Tensor) -> Tensor:
    """Compute |x_i - y_j|^2 of x (N, D) and y (M, D) from one matrix product: (N, M), never (N, M, D)."""
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
    """Compute sqrt(x) for x >= 0 with gradient 0 instead of infinity at 0."""
    positive = x > 0
    return torch.where(positive, x, 1).sqrt() * positive


def unit_vectors(x: Tensor, epsilon: float = EPSILON) -> Tensor:
    """Compute x / |x| along the last dimension. A zero vector stays zero; below |x| = epsilon it is x / epsilon.

    The result equals that of ``normalize``, whose gradient takes a third of a proxy loss's step: 11 passes over the
    proxies, where the closed form (g - y <g, y>) / |x| takes 4 (B=180, C=11 318, d=512).
    """
    learns = x.requires_grad and torch.is_grad_enabled()
    traced = torch.compiler.is_compiling() or torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]
    if traced or not learns:  # exporters support normalize
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
        if torch.is_grad_enabled():  # for second derivatives
            unit = normalize(x, dim=-1, eps=ctx.epsilon)
            return torch.autograd.grad(unit, x, gradient, create_graph=True)[0], None
        along = torch.linalg.vecdot(gradient, unit)[..., None].masked_fill_(norm < ctx.epsilon, 0)
        return torch.addcmul(gradient, unit, along, value=-1).div_(norm.clamp(min=ctx.epsilon)), None


def clip_features(features: Tensor, radius: float | None, border: Tensor | float) -> Tensor:
    """Shorten features (..., d) to the smaller of ``radius`` and ``border``; half precision becomes float32.

    In flat space, which has no border, ``border`` is infinite.
    """
    features = features.float() if features.itemsize < 4 else features
    if radius is None:
        longest = border
    else:
        longest = border.clamp(max=radius) if isinstance(border, Tensor) else min(border, radius)
    return features * (longest / features.norm(dim=-1, keepdim=True).clamp(min=longest))


class Cosines:
    """<x_i, v_j / |v_j|> of x (N, d) and vectors (M, d), without M unit vectors, and its gradient in closed form.

    The result equals ``x @ unit_vectors(vectors).T``, which takes 7 passes over the vectors; this takes 4. It builds no
    graph: a loss that processes its classes in blocks calls `pull_back` with the tensor to write the gradient to.

    Example:
        >>> cosines = Cosines(torch.tensor([[1.0, 0.0]]), torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
        >>> cosines.values.tolist()  # a zero vector has cosine 0
        [[0.6000000238418579, 0.0]]
        >>> cosines.pull_back(torch.ones(1, 2), of_vectors := torch.empty(2, 2)).tolist()
        [[0.6000000238418579, 0.800000011920929]]
        >>> torch.allclose(of_vectors[0], torch.tensor([0.128, -0.096]))  # (x - 0.6 v / |v|) / |v|
        True
    """

    def __init__(self, x: Tensor, vectors: Tensor) -> None:
        self.x, self.vectors = x.detach(), vectors.detach()
        self.norm = torch.linalg.vector_norm(self.vectors, dim=-1)
        self.inverse = self.norm.clamp(min=EPSILON).reciprocal_()
        self.values = (self.x @ self.vectors.T).mul_(self.inverse)  # (N, M)

    @torch.no_grad()
    def pull_back(self, gradient: Tensor, out: Tensor) -> Tensor:
        """Return the gradient of x (N, d) from that of the values (N, M); write that of the vectors to ``out`` (M, d).

        Call it only once: it overwrites the values.
        """
        gradient = gradient * self.inverse
        along = self.values.mul_(gradient).sum(0).mul_(self.inverse).masked_fill_(self.norm < EPSILON, 0)
        # subtracting within the product saves 6 to 9 % of the time of a separate pass at M = 11 318, 2 % at 100
        torch.mul(self.vectors, along[:, None], out=out).addmm_(gradient.T, self.x, beta=-1)
        return gradient @ self.vectors


def block_rows(columns: int) -> int:
    """Return how many rows of ``columns`` products to compute at once."""
    return max(1, min(BLOCK_ROWS, BLOCK_ENTRIES // columns))


def inner_products_into(x: Tensor, y: Tensor, out: Tensor) -> Tensor:
    """Compute x y^T of x (n, D) and y (N, D) in the first n rows of ``out``, (n, N).

    The CPU uses NumPy's BLAS: on an AMD EPYC its OpenBLAS does 166 GFLOP/s and torch's MKL 89.
    """
    out = out[: len(x)]
    if x.device.type != "cpu":
        return torch.mm(x, y.T, out=out)
    import numpy as np

    np.dot(x.numpy(), y.numpy().T, out=out.numpy())
    return out


def without_autocast(like: Tensor) -> AbstractContextManager[object]:
    """Return a context that disables autocast on the device of a tensor.

    If autocast is off, the context does nothing: it takes 1.5 us; torch's own takes 4.8 us, and 20 us in a step of a
    loss, when little of its code is in the cache.
    """
    device = like.device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()
