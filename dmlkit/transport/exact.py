"""Exact optimal transport: a vertex of the transport polytope, by enumeration or by shortest augmenting paths."""

import torch
from torch import Tensor

from dmlkit.transport.base import TransportSolver
from dmlkit.transport.solvers import (
    ENUMERATED_ROWS,
    assigned,
    best_assignment,
    is_small_assignment,
    shortest_augmenting_paths,
)


class Exact(TransportSolver, name="exact"):
    """Exact linear transport: a vertex, so each unit goes to one place; the plan has zero gradient.

    The linear program (R = 0), solved exactly for all problems at once, on the CPU or a GPU.

    An assignment problem (unit rows, integer columns: a grouplet) of up to 6 rows is solved by trying every
    permutation, any other by shortest augmenting paths in O((n + m) phases), all problems in parallel. In both cases
    the plan is a vertex: at most n + m - 1 entries are positive, and integer marginals give an integer plan. Among
    plans of equal cost, one is returned.

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
        return assigned(best_assignment(cost.double(), cols.double()), cost)

    @torch.no_grad()
    def solve(self, cost: Tensor, rows: Tensor, cols: Tensor) -> Tensor:
        if is_small_assignment(rows, cols):
            return assigned(best_assignment(cost, cols), cost)
        return shortest_augmenting_paths(cost, rows, cols)
