"""Members of the transport family: exact, quadratic and entropic solvers, and references by other packages."""

from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch
from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor

from dmlkit.transport.base import TransportSolver, check_installed
from dmlkit.transport.solvers import (
    ENUMERATED_ROWS,
    assigned,
    best_assignment,
    interior_point,
    is_quadratic_optimum,
    is_small_assignment,
    shortest_augmenting_paths,
    with_implicit_gradient,
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


class Emd(TransportSolver, name="emd"):
    """Earth mover's distance plan by POT's network simplex (Bonneel et al. 2011), for large single problems.

    Needs pip install 'dmlkit[transport]'.

    The linear program by `ot.emd`, one problem at a time on the CPU.

    **Gradient: zero, and the plan is returned without one**, as for `Exact`.

    Raises:
        ValueError: POT is not installed.

    Example:
        >>> Emd().plan(torch.tensor([[[0.0, 1.0], [0.1, 9.0]]]), torch.ones(1, 2), torch.ones(1, 2))
        tensor([[[0., 1.],
                 [1., 0.]]])
    """

    def __post_init__(self) -> None:
        check_installed("ot", "POT", "emd")

    @torch.no_grad()
    def solve(self, cost: Tensor, rows: Tensor, cols: Tensor) -> Tensor:
        import ot

        emd: Any = ot.emd
        # With a negative cost in a 1 x 1 problem POT 0.9.7 reports "infeasible"; a constant does not change the plan.
        positive = cost - cost.amin((1, 2), keepdim=True)
        arrays = zip(rows.cpu().numpy(), cols.cpu().numpy(), positive.cpu().numpy(), strict=True)
        plans = [emd(*problem) if problem[0].any() else np.zeros(cost.shape[1:]) for problem in arrays]
        return torch.from_numpy(np.stack(plans)).to(cost)


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
    unsolved = ~is_quadratic_optimum(cost, column, eps)
    if unsolved.any():
        plan[unsolved], support[unsolved] = interior_point(cost[unsolved], rows[unsolved], cols[unsolved], eps)
    return plan, support


Gradient = Literal["implicit", "unrolled", "envelope"]


class Sinkhorn(TransportSolver, name="sinkhorn"):
    r"""Sinkhorn (Cuturi 2013): entropic transport, dense and differentiable, by POT's batched solver.

    Needs pip install 'dmlkit[transport]'.

    min <c, x> + eps sum_ij x_ij log x_ij (Cuturi, NeurIPS 2013) through `ot.batch.solve_batch`.

    The iterations stop when the error of the row sums is below 1e-9 in norm, or after ``max_iterations`` (a small eps
    converges slowly). The result is then rounded onto the transport polytope (Altschuler et al., NeurIPS 2017,
    algorithm 2), so the marginals are always exact.

    Raises:
        ValueError: a value is out of range, or POT is not installed.

    Example:
        >>> plan = Sinkhorn().plan(torch.rand(3, 4, 6), torch.ones(3, 4), torch.full((3, 6), 4 / 6))
        >>> bool(torch.allclose(plan.sum(2), torch.ones(3, 4)))
        True
    """

    regularization: PositiveFloat = 0.05
    """eps, in cost units."""
    max_iterations: PositiveInt = 1000
    """Maximum number of iterations over both marginals; it stops earlier when the row sums are met."""
    gradient: Gradient = "implicit"
    """``implicit`` through the optimality conditions, ``unrolled`` through the iterations, or ``envelope`` for none."""

    def __post_init__(self) -> None:
        check_installed("ot", "POT", "sinkhorn")

    def solve(self, cost: Tensor, rows: Tensor, cols: Tensor) -> Tensor:
        if self.gradient == "unrolled":
            return self._iterate(cost, rows, cols)
        with torch.no_grad():
            plan = self._iterate(cost, rows, cols)
        if self.gradient == "envelope":
            return plan
        return with_implicit_gradient(cost, rows, cols, plan, plan / self.regularization)

    def _iterate(self, cost: Tensor, rows: Tensor, cols: Tensor) -> Tensor:
        import ot.batch

        solve_batch: Any = ot.batch.solve_batch
        result = solve_batch(
            cost,
            self.regularization,
            rows.clamp(min=1e-30),  # the logarithm must be finite, also for the gradient
            cols.clamp(min=1e-30),
            max_iter=self.max_iterations,
            tol=1e-9,
            method="log_sinkhorn",
            grad="autodiff" if self.gradient == "unrolled" else "detach",
        )
        inside = (rows[:, :, None] > 0) & (cols[:, None] > 0)
        return _round_to_polytope(result.plan.masked_fill(~inside, 0), rows, cols)


def _round_to_polytope(plan: Tensor, rows: Tensor, cols: Tensor) -> Tensor:
    """Round a plan to these marginals exactly: scale down excess mass, then add a rank-one term for missing mass."""
    tiny = torch.finfo(plan.dtype).tiny
    plan = plan * (rows / plan.sum(2).clamp(min=tiny)).clamp(max=1)[:, :, None]
    plan = plan * (cols / plan.sum(1).clamp(min=tiny)).clamp(max=1)[:, None]
    missing_rows, missing_cols = (rows - plan.sum(2)).clamp(min=0), (cols - plan.sum(1)).clamp(min=0)
    missing = missing_rows.sum(1).clamp(min=tiny)
    return plan + missing_rows[:, :, None] * missing_cols[:, None] / missing[:, None, None]


class Cvxpy(TransportSolver, name="cvxpy"):
    """cvxpylayers (Agrawal et al. 2019): the quadratic or linear program by a general solver, for reference.

    Needs pip install 'dmlkit[transport]'.

    min <c, x> + eps |x|^2 by a general conic solver (SCS through diffcp), one problem at a time on the CPU.

    **Gradient: implicit, for cost and marginals**, as differentiated by cvxpylayers.

    Raises:
        ValueError: the regularization is negative, or cvxpylayers is not installed.

    Example:
        >>> import torch
        >>> cost = torch.tensor([[[0.0, 1.0], [0.0, 0.6]]])
        >>> Cvxpy(regularization=0.5).plan(cost, torch.ones(1, 2), torch.ones(1, 2))
        tensor([[[0.6000, 0.4000],
                 [0.4000, 0.6000]]])
    """

    regularization: NonNegativeFloat = 1e-4
    """eps, in cost units per unit of mass; 0 is the linear program."""

    def __post_init__(self) -> None:
        check_installed("cvxpylayers", "cvxpylayers", "cvxpy")

    def solve(self, cost: Tensor, rows: Tensor, cols: Tensor) -> Tensor:
        layer = _layer(cost.shape[1], cost.shape[2], self.regularization)
        (plan,) = layer(cost.cpu(), rows.cpu(), cols.cpu())
        inside = (rows[:, :, None] > 0) & (cols[:, None] > 0)
        return plan.to(cost.device).masked_fill(~inside, 0)  # SCS leaves 1e-14 there


@lru_cache
def _layer(n: int, m: int, regularization: float) -> Any:
    """Return the program of one shape, compiled once: 20 ms for 4 x 100."""
    import cvxpy
    from cvxpylayers.torch.cvxpylayer import CvxpyLayer

    cost, rows, cols = cvxpy.Parameter((n, m)), cvxpy.Parameter(n), cvxpy.Parameter(m)
    plan: Any = cvxpy.Variable((n, m))
    objective: Any = cvxpy.sum(cvxpy.multiply(cost, plan))
    if regularization > 0:
        objective = objective + regularization * cvxpy.sum_squares(plan)
    constraints: list[Any] = [plan >= 0, cvxpy.sum(plan, axis=1) == rows, cvxpy.sum(plan, axis=0) == cols]
    problem = cvxpy.Problem(cvxpy.Minimize(objective), constraints)
    # SCS stops at 1e-4 by default, which leaves entries of -6e-4.
    return CvxpyLayer(problem, parameters=[cost, rows, cols], variables=[plan], solver_args={"eps": 1e-10})
