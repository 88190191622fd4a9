"""Exact optimal transport: a vertex of the transport polytope, by enumeration or by shortest augmenting paths."""

from functools import lru_cache
from itertools import permutations
from typing import Literal

import torch
from torch import Tensor

from dmlkit.transport.base import TransportConfig, TransportSolver
from dmlkit.transport.solvers.augmenting_paths import shortest_augmenting_paths

ENUMERATED_ROWS = 6  # 720 permutations a problem; 7 rows would be 5 040, slower than augmenting paths


class ExactConfig(TransportConfig, frozen=True):
    """Exact linear transport: a vertex, so each unit goes to one place; the plan has zero gradient."""

    name: Literal["exact"] = "exact"

    def build(self) -> "Exact":
        return Exact()


class Exact(TransportSolver):
    """The linear programme (R = 0), solved exactly for all problems at once, on the CPU or a GPU.

    An assignment problem (unit rows, whole columns: a grouplet) of up to 6 rows tries every permutation;
    anything else goes by shortest augmenting paths in O((n + m) phases), all problems in step. Either way the
    plan is a vertex: at most n + m - 1 entries are positive, and whole marginals give a whole plan. Among
    plans of equal cost one is taken.

    **Gradient: zero, and the plan is returned without one.** The plan is piecewise constant in the cost, so its
    derivative is 0 wherever it exists.

    Example:
        >>> cost = torch.tensor([[[0.0, 1.0, 5.0], [0.1, 9.0, 5.0]]])
        >>> Exact().plan(cost, torch.ones(1, 2), torch.tensor([[1.0, 1.0, 0.0]]))
        tensor([[[0., 1., 0.],
                 [1., 0., 0.]]])
    """

    @torch.no_grad()
    def assignment(self, cost: Tensor, cols: Tensor) -> Tensor:
        if cost.shape[1] > ENUMERATED_ROWS:
            return super().assignment(cost, cols)
        return _best_permutation(cost.double(), cols.double()).to(cost.dtype)

    @torch.no_grad()
    def solve(self, cost: Tensor, rows: Tensor, cols: Tensor) -> Tensor:
        is_small = cost.shape[1] <= ENUMERATED_ROWS
        if is_small and torch.equal(rows, torch.ones_like(rows)) and torch.equal(cols, cols.round()):
            return _best_permutation(cost, cols)
        return shortest_augmenting_paths(cost, rows, cols)


def _best_permutation(cost: Tensor, cols: Tensor) -> Tensor:
    """Plans (G, n, m) with unit rows and whole columns: each column is repeated once per unit, then assigned."""
    groups, n, _ = cost.shape
    units = torch.arange(0.5, n, dtype=cost.dtype, device=cost.device).expand(groups, n).contiguous()
    column = torch.searchsorted(cols.cumsum(1), units)  # (G, n): the column of each unit
    unit_cost = cost.gather(2, column[:, None].expand(-1, n, -1))  # (G, n, n)
    orders = _permutations(n).to(cost.device)  # (n!, n)
    entries = (orders + n * torch.arange(n, device=cost.device)).flatten()
    totals = unit_cost.flatten(1).index_select(1, entries).view(groups, -1, n).sum(2)  # (G, n!)
    chosen = column.gather(1, orders[totals.argmin(1)])  # (G, n): the column of each row
    return torch.zeros_like(cost).scatter_(2, chosen[:, :, None], 1)


@lru_cache
def _permutations(n: int) -> Tensor:
    return torch.tensor(list(permutations(range(n))))
