"""Small assignment problems by enumeration, and a test whether their plan is also the quadratic one."""

from functools import lru_cache
from itertools import permutations

import torch
from torch import Tensor

from dmlkit.transport.solvers.interior_point import TOLERANCE

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

    Example:
        >>> best_assignment(torch.tensor([[[0.0, 1.0, 5.0], [0.1, 9.0, 5.0]]]), torch.tensor([[1.0, 1.0, 0.0]]))
        tensor([[1, 0]])
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

    Example:
        >>> cost = torch.tensor([[[0.0, 1.0], [0.0, 0.6]]]).double()  # the other assignment costs 0.4 more
        >>> [bool(is_quadratic_optimum(cost, torch.tensor([[0, 1]]), eps)) for eps in (0.09, 0.11)]
        [True, False]
    """
    own = column[:, :, None]
    raised = cost.scatter_add(2, own, torch.full_like(own, 2 * eps, dtype=cost.dtype))
    own_cost = raised.gather(2, own)[:, :, 0]
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
