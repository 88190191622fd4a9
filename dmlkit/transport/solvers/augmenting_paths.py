"""Linear transport by shortest augmenting paths, for all problems of a batch in parallel."""

import torch
from torch import Tensor

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
    plan: Tensor,
    supply: Tensor,
    demand: Tensor,
    sink: Tensor,
    reached: Tensor,
    row_parent: Tensor,
    col_parent: Tensor,
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
