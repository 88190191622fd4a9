"""Quadratic transport by an interior-point method and an active-set polish, every problem of a batch in step."""

import torch
from torch import Tensor

from dmlkit.transport.implicit import potentials

GAP = 1e-10  # of max|c| times the total mass: from here the polish finds the support
MAX_STEPS = 60  # 6 to 16 are usual


def interior_point(cost: Tensor, rows: Tensor, cols: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    r"""The minimum of <c, x> + eps |x|^2 on transport polytopes, in float64.

    Mehrotra's predictor-corrector method (SIAM J. Optim. 1992) from the feasible start x_ij = r_i s_j / total, so every
    iterate keeps the marginals and a positive reduced cost z = c + 2 eps x - u - v; each step factorises one n x n Schur
    complement a problem. `_polish` then solves the equations of the support exactly.

    Args:
        cost: (G, n, m).
        rows, cols: (G, n) and (G, m) >= 0 with equal totals; zeros hold zeros.
        eps: > 0.

    Returns:
        The plan (G, n, m) and its support (G, n, m) bool.
    """
    inside = (rows[:, :, None] > 0) & (cols[:, None] > 0)
    mask = inside.to(cost.dtype)
    total = rows.sum(1)[:, None, None].clamp(min=torch.finfo(cost.dtype).tiny)
    count = mask.sum((1, 2), keepdim=True).clamp(min=1)
    # Outside the mask x = z = 1 and neither moves.
    x = torch.where(inside, rows[:, :, None] * cols[:, None] / total, 1)
    marginal_cost = cost + 2 * eps * x
    scale = torch.where(inside, marginal_cost.abs(), 0).amax((1, 2), keepdim=True)
    low = torch.where(inside, marginal_cost, torch.inf).amin(2).nan_to_num_(posinf=0)
    u = low - (0.5 * scale[:, :, 0]).clamp(min=torch.finfo(cost.dtype).tiny)
    v = torch.zeros_like(cols)
    z = torch.where(inside, marginal_cost - u[:, :, None], 1)
    for _ in range(MAX_STEPS):
        gap = (mask * x * z).sum((1, 2), keepdim=True)
        active = gap > GAP * scale * total
        if not active.any():
            break
        dx, du, dv, dz = _direction(x, z, mask, gap / count, eps)
        # 0.995 of the way to the border; problems that have converged wait.
        towards = torch.maximum(-dx / x, -dz / z).amax((1, 2), keepdim=True)
        step = (0.995 / towards.clamp(min=0.995)).masked_fill(~active, 0)
        x, z, u, v = x + step * dx, z + step * dz, u + step[:, :, 0] * du, v + step[:, 0] * dv
    return _polish(cost, rows, cols, eps, x * mask, inside & (x > z * (total / scale)), u, v)


def _direction(x: Tensor, z: Tensor, mask: Tensor, mean: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The step (dx, du, dv, dz) to x * z = target, first to 0 and then to the target that this one suggests."""
    ratio = z / x
    weights = mask / (2 * eps + ratio)
    row_weights, col_weights = weights.sum(2), weights.sum(1)
    shares = weights / torch.where(col_weights > 0, col_weights, 1)[:, None]
    # The constant (1, -1) is free in u, v: the mean of the diagonal fixes it without moving anything else.
    schur = (row_weights.mean(1) / x.shape[1])[:, None, None] - shares @ weights.mT
    schur.diagonal(dim1=1, dim2=2).add_(torch.where(row_weights > 0, row_weights * (1 + 1e-14), 1))
    factor, _ = torch.linalg.cholesky_ex(schur)

    def towards(target: Tensor | float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        pull = target / x - z
        flow = weights * pull
        col_flow = flow.sum(1)
        right = (shares @ col_flow[:, :, None]) - flow.sum(2, keepdim=True)
        du = torch.cholesky_solve(right, factor)[:, :, 0]
        dv = -col_flow / torch.where(col_weights > 0, col_weights, 1) - (shares.mT @ du[:, :, None])[:, :, 0]
        dx = weights * (du[:, :, None] + dv[:, None] + pull)
        return dx, du, dv, mask * (pull - ratio * dx)

    dx, _, _, dz = towards(0.0)
    step = (1 / torch.maximum(-dx / x, -dz / z).amax((1, 2), keepdim=True).clamp(min=1e-30)).clamp(max=1)
    after = (mask * (x + step * dx) * (z + step * dz)).sum((1, 2), keepdim=True) / mask.sum((1, 2), keepdim=True).clamp(
        min=1
    )
    return towards((after / mean) ** 3 * mean - dx * dz)


def _polish(
    cost: Tensor, rows: Tensor, cols: Tensor, eps: float, x: Tensor, support: Tensor, u: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """The plan that satisfies the equations of its support to rounding, where these have a valid solution.

    On the support x = (u + v - c) / (2 eps) must meet the marginals, off it u + v - c must not be positive.
    Problems for which this fails (a support that is not settled: an entry that is 0 with reduced cost 0, or an eps
    so small that the division loses it) keep the interior point, whose marginals are as exact.
    """
    slope = support.to(cost.dtype) / (2 * eps)
    for _ in range(2):  # the second takes away the rounding error of the first
        guess = slope * (u[:, :, None] + v[:, None] - cost)
        du, dv = potentials(slope, rows - guess.sum(2), cols - guess.sum(1))
        u, v = u + du, v + dv
    reduced = u[:, :, None] + v[:, None] - cost
    polished = slope * reduced
    error = torch.maximum((polished.sum(2) - rows).abs().amax(1), (polished.sum(1) - cols).abs().amax(1))
    inside = (rows[:, :, None] > 0) & (cols[:, None] > 0)
    slack = (reduced * (inside & ~support)).amax((1, 2))
    tolerance = 1e-10
    valid = (
        (error <= tolerance * rows.sum(1))
        & (slack <= tolerance * cost.abs().amax((1, 2)))
        & (polished.amin((1, 2)) >= 0)
    )[:, None, None]
    return torch.where(valid, polished, x), support
