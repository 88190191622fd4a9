"""Quadratic transport by an interior-point method and an active-set polish, for all problems of a batch at once."""

import torch
from torch import Tensor

from dmlkit.transport.solvers.implicit import potentials

GAP = 1e-10  # relative to range of costs times total mass: below it, the polish finds the support
MAX_STEPS = 60  # 6 to 16 are usual
NEWTON_STEPS = 10  # 1 unless an entry is 0 with reduced cost 0
TOLERANCE = 1e-10  # error allowed in the polish, relative to the total mass and to the range of costs


def interior_point(cost: Tensor, rows: Tensor, cols: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    r"""Compute the minimum of <c, x> + eps |x|^2 on transport polytopes, in float64.

    Mehrotra's predictor-corrector method (SIAM J. Optim. 1992) from the feasible start x_ij = r_i s_j / total, so
    every iterate satisfies the marginals and has a positive reduced cost z = c + 2 eps x - u - v; each step factorizes
    one n x n Schur complement per problem. `_polish` then solves the equations of the support exactly.

    Args:
        cost: (G, n, m).
        rows, cols: (G, n) and (G, m) >= 0 with equal totals; the plan is 0 where they are 0.
        eps: > 0.

    Returns:
        The plan (G, n, m) and its support (G, n, m) bool.
    """
    rows, cols = rows[:, :, None], cols[:, None]  # (G, n, 1) and (G, 1, m), as u and v below
    cost = cost - cost.amin(2, keepdim=True)  # constants per row and column do not change the plan, only the scale
    cost = cost - cost.amin(1, keepdim=True)
    inside = (rows > 0) & (cols > 0)
    mask = inside.to(cost.dtype)
    pads = (rows == 0).to(cost.dtype), (cols == 0).to(cost.dtype)
    tiny = torch.finfo(cost.dtype).tiny
    total = rows.sum((1, 2), keepdim=True).clamp(min=tiny)
    x = torch.where(inside, rows * cols / total, 1)  # outside, x stays 1 and z decreases with the others
    z = cost + 2 * eps * x
    scale = (mask * z).abs().amax((1, 2), keepdim=True).clamp(min=tiny)
    u = z.amin(2, keepdim=True) - 0.5 * scale
    v = torch.zeros_like(cols)
    z = torch.where(inside, z - u, scale)
    for _ in range(MAX_STEPS):
        gap = (mask * x * z).sum((1, 2), keepdim=True)
        active = gap > GAP * scale * total
        if not active.any():
            break
        dx, du, dv, dz, limit = _direction(x, z, mask, pads, gap.clamp(min=tiny), eps)
        step = (0.995 * limit).clamp_(max=1) * active  # problems that have converged wait
        x, z, u, v = x + step * dx, z + step * dz, u + step * du, v + step * dv
    return _polish(cost, rows, cols, eps, x * mask, inside & (x * scale > z * total), u, v)


def _direction(
    x: Tensor, z: Tensor, mask: Tensor, pads: tuple[Tensor, Tensor], gap: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute the step (dx, du, dv, dz) to x * z = target, predictor then corrector, and its maximum length."""
    ratio = z / x
    weights = mask / (ratio + 2 * eps)
    row_weights = weights.sum(2, keepdim=True) + pads[0]
    col_weights = weights.sum(1, keepdim=True) + pads[1]
    shares = weights / col_weights
    shares_t, weights_t = shares.mT, weights.mT
    # The constant (1, -1) is free in u, v: the mean of the diagonal fixes it and changes nothing else.
    schur = row_weights.mean(1, keepdim=True) / x.shape[1] - shares @ weights_t
    schur.diagonal(dim1=1, dim2=2).add_(row_weights[:, :, 0], alpha=1 + 1e-14)
    factor, _ = torch.linalg.cholesky_ex(schur)

    def towards(pull: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        flow = weights * pull
        right = torch.baddbmm(flow.sum(2, keepdim=True), shares, flow.sum(1)[:, :, None], beta=-1)
        du = torch.cholesky_solve(right, factor)
        dv = -(flow.sum(1, keepdim=True) / col_weights) - (shares_t @ du).mT
        change = du + dv + pull
        dx = weights * change
        return dx, du, dv, pull - ratio * dx

    def limit(dx: Tensor, dz: Tensor) -> Tensor:
        """Return how far x and z remain positive."""
        fastest = torch.minimum(dx / x, dz / z).amin((1, 2), keepdim=True)
        return -1 / fastest.clamp_(max=-1e-30)

    dx, _, _, dz = towards(-z)
    step = limit(dx, dz).clamp_(max=1)
    after = (torch.addcmul(x, step, dx) * torch.addcmul(z, step, dz) * mask).sum((1, 2), keepdim=True)
    target = (after / gap) ** 3 * gap / mask.sum((1, 2), keepdim=True).clamp(min=1)
    dx, du, dv, dz = towards((target - dx * dz) / x - z)
    return dx, du, dv, dz, limit(dx, dz)


def _polish(
    cost: Tensor, rows: Tensor, cols: Tensor, eps: float, x: Tensor, support: Tensor, u: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the plan that satisfies the equations of its support to rounding, by Newton steps on u and v.

    On the support, x = (u + v - c) / (2 eps) must satisfy the marginals; elsewhere u + v - c must not be positive. A
    step solves the former and takes the positive entries as the next support. Problems without a valid solution after
    `NEWTON_STEPS` (eps is so small that the division loses it) keep the interior point x, whose marginals are exact.
    """
    inside = (rows > 0) & (cols > 0)
    total = rows.sum((1, 2), keepdim=True)
    spread = cost.amax((1, 2), keepdim=True)
    found, plan = torch.zeros_like(total, dtype=torch.bool), x
    for _ in range(NEWTON_STEPS):
        slope = support.to(cost.dtype) / (2 * eps)
        guess = slope * (u + v - cost)
        missing = (rows - guess.sum(2, keepdim=True))[:, :, 0], (cols - guess.sum(1, keepdim=True))[:, 0]
        du, dv = potentials(slope, *missing)
        u, v = u + du[:, :, None], v + dv[:, None]
        reduced = u + v - cost
        polished = slope * reduced.clamp(min=0)
        error = (polished.sum(2, keepdim=True) - rows).abs().amax((1, 2), keepdim=True) + (
            polished.sum(1, keepdim=True) - cols
        ).abs().amax((1, 2), keepdim=True)
        slack = (reduced * (inside & ~support)).amax((1, 2), keepdim=True)
        valid = (error <= TOLERANCE * total) & (slack <= TOLERANCE * spread) & ~found
        plan, found = torch.where(valid, polished, plan), found | valid
        if found.all():
            break
        support = torch.where(found, support, inside & (reduced > 0))
    return plan, torch.where(found, support, inside & (x > 0))
