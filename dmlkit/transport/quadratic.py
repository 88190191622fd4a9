"""Quadratically regularized optimal transport with implicit gradients."""

import torch
from pydantic import PositiveFloat
from torch import Tensor

from dmlkit.transport.base import TransportSolver
from dmlkit.transport.solvers import (
    assigned,
    best_assignment,
    interior_point,
    is_quadratic_optimum,
    is_small_assignment,
    with_implicit_gradient,
)


class Quadratic(TransportSolver, name="quadratic"):
    r"""Quadratic transport (OptNet's form in Zhang et al. 2022): differentiable and sparse, with a native solver.

    min <c, x> + eps |x|^2: the program that Grouplet (Zhang et al., CVPR 2022, section 4.1) solves with OptNet.

    An interior-point method with an active-set polish solves all problems at once, on the CPU or a GPU. Small
    assignments whose plan is a vertex, as most are at the paper's eps, are found by enumeration and verified by their
    potentials.

    **Gradient: exact, implicit, for cost and marginals.** The plan is piecewise linear in the problem; at a kink
    the slope of the returned support is used. The gradient is zero if the plan is at a vertex, as most plans of unit
    marginals are at the paper's eps = 1e-4; a larger eps spreads the plan and gives a non-zero gradient.

    Raises:
        ValueError: the regularization is not positive.

    Example:
        >>> cost = torch.tensor([[[0.0, 1.0], [0.0, 0.6]]], requires_grad=True)
        >>> plan = Quadratic(regularization=0.5).plan(cost, torch.ones(1, 2), torch.ones(1, 2))
        >>> plan.detach()
        tensor([[[0.6000, 0.4000],
                 [0.4000, 0.6000]]])
        >>> torch.autograd.grad(plan[0, 0, 0], cost)[0]
        tensor([[[-0.2500,  0.2500],
                 [ 0.2500, -0.2500]]])
    """

    regularization: PositiveFloat = 1e-4
    """eps, in cost units per unit of mass."""

    def solve(self, cost: Tensor, rows: Tensor, cols: Tensor) -> Tensor:
        with torch.no_grad():
            plan, support = _plan_and_support(cost, rows, cols, self.regularization)
        return with_implicit_gradient(cost, rows, cols, plan, support.to(cost.dtype) / (2 * self.regularization))


def _plan_and_support(cost: Tensor, rows: Tensor, cols: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    if not is_small_assignment(rows, cols):
        return interior_point(cost, rows, cols, eps)
    column = best_assignment(cost, cols)
    plan = assigned(column, cost)
    support = plan > 0
    rest = ~is_quadratic_optimum(cost, column, eps)
    if rest.any():
        plan[rest], support[rest] = interior_point(cost[rest], rows[rest], cols[rest], eps)
    return plan, support
