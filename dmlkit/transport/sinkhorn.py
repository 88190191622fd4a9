"""Entropic optimal transport by POT's batched log-domain Sinkhorn iterations."""

from typing import Any, Literal

import torch
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor

from dmlkit.transport.base import TransportSolver, check_installed
from dmlkit.transport.solvers import with_implicit_gradient

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
