import ot
import pytest
import torch
from torch import Tensor

from dmlkit.transport import Sinkhorn


def problem(groups: int = 3, n: int = 4, m: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (groups, n, m), (groups, n), (groups, m)
    cost, rows, cols = (torch.rand(shape, generator=generator, dtype=torch.float64) + 0.1 for shape in shapes)
    return cost, rows, cols * (rows.sum(1) / cols.sum(1))[:, None]


@pytest.mark.parametrize("eps", [1.0, 0.1, 0.02])
def test_agrees_with_pots_single_solver(eps: float):
    cost, rows, cols = problem()
    plan = Sinkhorn(regularization=eps, max_iterations=10_000).plan(cost, rows, cols)
    for group in range(3):
        arrays = rows[group].numpy(), cols[group].numpy(), cost[group].numpy()
        expected = ot.sinkhorn(*arrays, eps, method="sinkhorn_log", numItermax=100_000, stopThr=1e-12)
        torch.testing.assert_close(plan[group], torch.from_numpy(expected), atol=1e-7, rtol=0)


@pytest.mark.parametrize("gradient", ["implicit", "unrolled"])
@pytest.mark.parametrize("eps", [1.0, 0.1])
def test_gradient_equals_finite_differences(gradient: str, eps: float):
    cost, rows, cols = problem(groups=2)
    solver = Sinkhorn(regularization=eps, max_iterations=10_000, gradient=gradient)
    balance = torch.eye(4, dtype=torch.float64) - 0.25  # moves that keep the total

    def plan(cost: Tensor, moves: Tensor) -> Tensor:
        return solver.plan(cost, rows + moves @ balance, cols)

    inputs = cost.requires_grad_(), torch.zeros(2, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(plan, inputs, atol=1e-5, rtol=1e-3)


def test_envelope_is_a_constant():
    cost, rows, cols = problem()
    assert not Sinkhorn(gradient="envelope").plan(cost.requires_grad_(), rows, cols).requires_grad


def test_marginals_hold_when_the_iterations_run_out():
    cost, rows, cols = problem()
    plan = Sinkhorn(regularization=1e-3, max_iterations=2).plan(cost, rows, cols)
    torch.testing.assert_close(plan.sum(2), rows, atol=1e-12, rtol=0)
    torch.testing.assert_close(plan.sum(1), cols, atol=1e-12, rtol=0)
    assert plan.min() >= 0


def test_rounding_survives_marginals_that_fit_already():
    """What is missing is then rounding error of both signs, whose sum may be 0."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        cost = torch.rand(8, 4, 4, generator=generator, dtype=torch.float64)
        ones = torch.ones(8, 4, dtype=torch.float64)
        plan = Sinkhorn(regularization=0.3).plan(cost, ones, ones)
        torch.testing.assert_close(plan.sum(2), ones, atol=1e-12, rtol=0)
