"""Solvers that the members of the family share: assignment, interior point, implicit differentiation."""

from functools import lru_cache
from itertools import permutations
from typing import Any

import torch
from torch import Tensor

ENUMERATED_ROWS = 6  # 720 permutations per problem; 7 rows would be 5 040, slower than augmenting paths


def is_small_assignment(rows: Tensor, cols: Tensor) -> bool:
    """Return whether problems with sums (G, n) and (G, m) have unit rows, integer columns, and few enough rows."""
    return (
        rows.shape[1] <= ENUMERATED_ROWS
        and torch.equal(rows, torch.ones_like(rows))
        and torch.equal(cols, cols.round())
    )


def best_assignment(cost: Tensor, cols: Tensor) -> Tensor:
    """Return the column (G, n) of each row in a minimum-cost assignment of cost (G, n, m), n <= `ENUMERATED_ROWS`.

    Each column is repeated once per unit of its integer sum (G, m), and every permutation is tried.
    """
    groups, n, _ = cost.shape
    units = torch.arange(0.5, n, dtype=cost.dtype, device=cost.device).expand(groups, n).contiguous()
    column = torch.searchsorted(cols.cumsum(1), units)  # (G, n): the column of each unit
    unit_cost = cost.gather(2, column[:, None].expand(-1, n, -1))  # (G, n, n)
    orders = _permutations(n).to(cost.device)  # (n!, n)
    entries = (orders + n * torch.arange(n, device=cost.device)).flatten()
    totals = unit_cost.flatten(1).index_select(1, entries).view(groups, -1, n).sum(2)  # (G, n!)
    return column.gather(1, orders[totals.argmin(1)])


def assigned(column: Tensor, cost: Tensor) -> Tensor:
    """Return the plans of assignments (G, n), shaped like their cost (G, n, m)."""
    return torch.zeros_like(cost).scatter_(2, column[:, :, None], 1)


def is_quadratic_optimum(cost: Tensor, column: Tensor, eps: float) -> Tensor:
    """Return which minimum-cost assignments x (G, n) also minimize <c, x> + eps |x|^2: (G,) bool.

    They do if there are potentials with u_i + v_j = c_ij + 2 eps on the assignment and u_i + v_j <= c_ij elsewhere.
    These are distances in the residual graph of the raised costs; n sweeps find them if there is no negative cycle.
    """
    index = column[:, :, None]
    raised = cost.scatter_add(2, index, torch.full_like(index, 2 * eps, dtype=cost.dtype))
    own_cost = raised.gather(2, index)[:, :, 0]
    to_row = torch.zeros_like(own_cost)  # -u
    for _ in range(column.shape[1]):
        back = _nearest(to_row, raised).gather(1, column) - own_cost
        to_row = torch.minimum(to_row, back)
    missing = to_row + own_cost - _nearest(to_row, raised).gather(1, column)
    return missing.amax(1) <= TOLERANCE * (cost.amax((1, 2)) - cost.amin((1, 2)))


def _nearest(to_row: Tensor, cost: Tensor) -> Tensor:
    """Return v (G, m), the distance of each column."""
    return (to_row[:, :, None] + cost).amin(1)


@lru_cache
def _permutations(n: int) -> Tensor:
    return torch.tensor(list(permutations(range(n))))


TIE = 1e-13  # extra cost of an arc outside the support, relative to the range of the costs


def shortest_augmenting_paths(cost: Tensor, rows: Tensor, cols: Tensor) -> Tensor:
    """Compute optimal vertices (G, n, m) of transport problems with float64 cost (G, n, m), rows (G, n), cols (G, m).

    Successive shortest paths with potentials (Ahuja, Magnanti and Orlin, Network Flows, 1993, section 9.7): starting
    from all rows with remaining supply, Bellman-Ford sweeps over the residual graph find the nearest column with
    remaining demand; flow is pushed along that path, and the potentials keep every reduced cost non-negative. Among
    shortest paths, one with the fewest arcs outside the support is used; it enters each tree of the support at most
    once, so the support remains a forest and the plan is a vertex. Integer marginals give an integer plan.

    The cost per unit of the plan exceeds the optimum by at most (n + m) * 1e-13 times the range of the costs.
    """
    negligible = 1e-12 * rows.sum(1, keepdim=True)
    cost = cost - cost.amin(1, keepdim=True)  # constants per column and row do not change the plan, only the scale
    cost -= cost.amin(2, keepdim=True)
    tie = TIE * cost.amax((1, 2), keepdim=True).clamp(min=torch.finfo(cost.dtype).tiny)
    u, v = torch.zeros_like(rows), torch.zeros_like(cols)
    plan = _greedy_start(cost, rows, cols)
    supply, demand = rows - plan.sum(2), cols - plan.sum(1)
    while (supply > negligible).any():
        reduced = ((cost - u[:, :, None] - v[:, None]).clamp_(min=0) + tie).masked_fill_(plan > 0, 0)
        to_row, to_col, row_parent, col_parent = _sweep(reduced, plan > 0, supply > negligible)
        nearest, sink = to_col.masked_fill(demand <= negligible, torch.inf).min(1, keepdim=True)  # (G, 1)
        reached = nearest.isfinite()
        if not reached.any():
            break
        nearest = nearest.masked_fill(~reached, 0)
        u += (nearest - to_row).clamp_(min=0)
        v -= (nearest - to_col).clamp_(min=0)
        _augment(plan, supply, demand, sink, reached, row_parent, col_parent)
    return plan


def _greedy_start(reduced: Tensor, rows: Tensor, cols: Tensor) -> Tensor:
    """Assign each row's supply to its nearest column; a column accepts rows in order while it has demand left."""
    offer = torch.zeros_like(reduced).scatter_(2, reduced.argmin(2, keepdim=True), rows[:, :, None])
    taken = torch.minimum(offer.cumsum(1), cols[:, None])  # (G, n, m): amount accepted up to each row
    plan = torch.diff(taken, dim=1, prepend=taken.new_zeros(len(taken), 1, taken.shape[2]))
    return torch.where(plan > 1e-12 * rows.sum(1)[:, None, None], plan, 0)


def _sweep(reduced: Tensor, support: Tensor, has_supply: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute distances from any row with supply to all rows and columns, with the previous node on each path.

    Row to column costs ``reduced``; column to row costs 0 on the support and is impossible elsewhere. A parent changes
    only if a distance strictly decreases, so that arcs of cost 0 cannot form a cycle. A row with supply has parent -1.
    """
    groups, n, m = reduced.shape
    reduced_t = reduced.mT.contiguous()  # (G, m, n): a minimum runs over adjacent entries
    closed = torch.zeros_like(reduced).masked_fill_(~support, torch.inf)
    to_row = reduced.new_zeros(groups, n).masked_fill_(~has_supply, torch.inf)
    to_col = reduced.new_full((groups, m), torch.inf)
    row_parent = torch.full((groups, n), -1, device=reduced.device)
    col_parent = torch.full((groups, m), -1, device=reduced.device)
    while True:
        through, parent = (to_row[:, None] + reduced_t).min(2)
        nearer = through < to_col
        to_col, col_parent = torch.where(nearer, through, to_col), torch.where(nearer, parent, col_parent)
        through, parent = (to_col[:, None] + closed).min(2)
        nearer = through < to_row
        if not nearer.any():
            return to_row, to_col, row_parent, col_parent
        to_row, row_parent = torch.where(nearer, through, to_row), torch.where(nearer, parent, row_parent)


def _augment(
    plan: Tensor, supply: Tensor, demand: Tensor, sink: Tensor, reached: Tensor, row_parent: Tensor, col_parent: Tensor
) -> None:
    """Push as much as possible along the path to each sink (G, 1); problems not ``reached`` do not change."""
    group = torch.arange(len(plan), device=plan.device)[:, None]
    amount = demand.gather(1, sink).masked_fill(~reached, 0)
    steps: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    col, active, source = sink, reached, torch.zeros_like(sink)
    while True:  # from the sink back to the source
        row = col_parent.gather(1, col).clamp_(min=0)
        before = row_parent.gather(1, row)
        onward = active & (before >= 0)
        available = torch.where(onward, plan[group, row, before.clamp(min=0)], supply.gather(1, row))
        amount = torch.where(active, torch.minimum(amount, available), amount)
        steps.append((row, col, before.clamp(min=0), onward))
        source = torch.where(active, row, source)
        if not onward.any():
            break
        col, active = torch.where(onward, before, col), onward
    active = reached
    for row, col, before, onward in steps:
        plan[group, row, col] += amount.masked_fill(~active, 0)
        plan[group, row, before] -= amount.masked_fill(~onward, 0)
        active = onward
    demand.scatter_add_(1, sink, -amount)
    supply.scatter_add_(1, source, -amount)


# Relative to range of costs times total mass: below the first, the polish finds the support, unless some entries are
# below 1e-6; with entries from 1 to 1e-8 it fails for 56 of 200 problems, and below the second for 1.
GAPS = (1e-10, 1e-16)
MAX_STEPS = 60  # 6 to 16 are usual
NEWTON_STEPS = 10  # 1 unless an entry is 0 with reduced cost 0
TOLERANCE = 1e-10  # error allowed in the polish, relative to the total mass and to the range of costs


def interior_point(cost: Tensor, rows: Tensor, cols: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    r"""Compute the minimum of <c, x> + eps |x|^2 on transport polytopes, in float64.

    Mehrotra's predictor-corrector method (SIAM J. Optim. 1992) from the feasible start x_ij = r_i s_j / total, so
    every iterate satisfies the marginals and has a positive reduced cost z = c + 2 eps x - u - v; each step factorizes
    one n x n Schur complement per problem. `_polish` then solves the equations of the support exactly.

    Args:
        rows, cols: (G, n) and (G, m) >= 0 with equal totals; the plan is 0 where they are 0.
        eps: weight of |x|^2, > 0.

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
    plan, support, solved = x, inside, torch.zeros_like(total, dtype=torch.bool)
    for goal in GAPS:
        for _ in range(MAX_STEPS):
            gap = (mask * x * z).sum((1, 2), keepdim=True)
            active = (gap > goal * scale * total) & ~solved
            if not active.any():
                break
            dx, du, dv, dz, limit = _direction(x, z, mask, pads, gap.clamp(min=tiny), eps)
            step = (0.995 * limit).clamp_(max=1) * active  # problems that have converged wait
            x, z, u, v = x + step * dx, z + step * dz, u + step * du, v + step * dv
        guess = inside & (x * scale > z * total)
        polished, used, valid = _polish(cost, rows, cols, eps, x * mask, guess, u, v)
        plan, support = torch.where(solved, plan, polished), torch.where(solved, support, used)
        solved = solved | valid
        if solved.all():
            break
    return plan, support


def _direction(
    x: Tensor, z: Tensor, mask: Tensor, pads: tuple[Tensor, Tensor], gap: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute the step (dx, du, dv, dz) to x * z = target, predictor then corrector, and its maximum length."""
    ratio = z / x
    weights = mask / (ratio + 2 * eps)
    row_weights, col_weights = weights.sum(2, keepdim=True), weights.sum(1, keepdim=True)
    # An empty row or column gets the largest weight of its problem: 1 would drown weights of 1e-12, at costs of 1e12.
    row_weights = row_weights + pads[0] * _largest(row_weights)
    col_weights = col_weights + pads[1] * _largest(col_weights)
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


def _largest(weights: Tensor) -> Tensor:
    """Return the largest weight of each problem (G, 1, 1); 1 for an empty problem."""
    largest = weights.amax((1, 2), keepdim=True)
    return torch.where(largest > 0, largest, 1)


def _polish(
    cost: Tensor, rows: Tensor, cols: Tensor, eps: float, x: Tensor, support: Tensor, u: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the plan that satisfies the equations of its support to rounding, by Newton steps on u and v.

    On the support, x = (u + v - c) / (2 eps) must satisfy the marginals; elsewhere u + v - c must not be positive. A
    step solves the former and takes the positive entries as the next support. Problems without a valid solution after
    `NEWTON_STEPS` (eps is so small that the division loses it) keep the interior point x, whose marginals are exact.

    Returns:
        The plan (G, n, m), its support (G, n, m) bool, and which problems have a valid solution (G, 1, 1) bool.
    """
    inside = (rows > 0) & (cols > 0)
    total = rows.sum((1, 2), keepdim=True)
    spread = cost.amax((1, 2), keepdim=True)
    solved, plan = torch.zeros_like(total, dtype=torch.bool), x
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
        valid = (error <= TOLERANCE * total) & (slack <= TOLERANCE * spread) & ~solved
        plan, solved = torch.where(valid, polished, plan), solved | valid
        if solved.all():
            break
        support = torch.where(solved, support, inside & (reduced > 0))
    return plan, torch.where(solved, support, inside & (x > 0)), solved


def with_implicit_gradient(cost: Tensor, rows: Tensor, cols: Tensor, plan: Tensor, slope: Tensor) -> Tensor:
    r"""Return ``plan`` (G, n, m) with its gradient as the solution of a regularized transport problem.

    At the optimum x_ij = f(u_i + v_j - c_ij) with potentials u, v that satisfy the marginals. If f has slope w_ij,

    .. math:: dx = w \odot (du \oplus dv - dc), \qquad
            \begin{pmatrix} \text{diag}(w 1) & w \\ w^\top & \text{diag}(w^\top 1) \end{pmatrix}
            \begin{pmatrix} du \\ dv \end{pmatrix} =
            \begin{pmatrix} d\text{rows} + (w \odot dc) 1 \\ d\text{cols} + (w \odot dc)^\top 1 \end{pmatrix}

    so one symmetric solve with the incoming gradient gives the gradient with respect to cost and marginals.

    Args:
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
