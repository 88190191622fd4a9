"""Optimal transport by cvxpylayers: an independent reference for the native solvers."""

from functools import lru_cache
from typing import Any

from pydantic import NonNegativeFloat
from torch import Tensor

from dmlkit.transport.base import TransportSolver, check_installed


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
