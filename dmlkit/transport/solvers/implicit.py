"""The gradient of a regularized transport plan by the implicit function theorem."""

from typing import Any

import torch
from torch import Tensor


def with_implicit_gradient(cost: Tensor, rows: Tensor, cols: Tensor, plan: Tensor, slope: Tensor) -> Tensor:
    r"""Return ``plan`` (G, n, m) with its gradient as the solution of a regularized transport problem.

    At the optimum x_ij = f(u_i + v_j - c_ij) with potentials u, v that satisfy the marginals. If f has slope w_ij,

    .. math:: dx = w \odot (du \oplus dv - dc), \qquad
            \begin{pmatrix} \text{diag}(w 1) & w \\ w^\top & \text{diag}(w^\top 1) \end{pmatrix}
            \begin{pmatrix} du \\ dv \end{pmatrix} =
            \begin{pmatrix} d\text{rows} + (w \odot dc) 1 \\ d\text{cols} + (w \odot dc)^\top 1 \end{pmatrix}

    so one symmetric solve with the incoming gradient gives the gradient with respect to cost and marginals.

    Args:
        cost, rows, cols: the problem.
        plan: its solution, without a gradient.
        slope: w (G, n, m) >= 0; 1/(2 eps) on the support of a quadratic plan, x/eps for an entropic one.
    """
    return _ImplicitPlan.apply(cost, rows, cols, plan, slope)


class _ImplicitPlan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        plan, slope = tensors[3:]
        ctx.save_for_backward(slope)
        return plan.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (slope,) = ctx.saved_tensors
        weighted = slope * grad_outputs[0]
        u, v = potentials(slope, weighted.sum(2), weighted.sum(1))
        return slope * (u[:, :, None] + v[:, None]) - weighted, u, v, None, None


def potentials(weights: Tensor, row_sums: Tensor, col_sums: Tensor) -> tuple[Tensor, Tensor]:
    """Return u (G, n), v (G, m) such that weights * (u_i + v_j) has the given row and column sums.

    They are unique up to a constant per connected component of the support of ``weights`` (G, n, m) >= 0, and exist
    if the sums balance in each component. Rows and columns without weight get 0 and need sum 0.
    """
    row_weights, col_weights = weights.sum(2), weights.sum(1)
    row_scale = torch.where(row_weights > 0, row_weights, 1)
    col_scale = torch.where(col_weights > 0, col_weights, 1)
    shares = weights / col_scale[:, None]
    schur = -(shares @ weights.mT)
    # Each component of the support leaves one direction free: 1e-13 of the diagonal fixes it; eigenvalues are > 1e-4
    # of the diagonal on a path of 64 nodes.
    schur.diagonal(dim1=1, dim2=2).add_(row_scale * (1 + 1e-13))
    factor, _ = torch.linalg.cholesky_ex(schur)
    right = row_sums - (shares @ col_sums[:, :, None])[:, :, 0]
    u = torch.cholesky_solve(right[:, :, None], factor)[:, :, 0]
    return u, col_sums / col_scale - (shares.mT @ u[:, :, None])[:, :, 0]
