"""The quadratic solvers: optimality without duals, agreement with cvxpylayers, gradients by finite differences."""

import pytest
import torch
from torch import Tensor

from dmlkit.transport import Cvxpy, Emd, Quadratic
from dmlkit.transport.base import TransportSolver
from dmlkit.transport.solvers import best_assignment, interior_point, is_quadratic_optimum, with_implicit_gradient


def problem(seed: int, n: int, m: int, groups: int = 3, spread: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = (groups, n, m), (groups, n), (groups, m)
    cost, rows, cols = (torch.rand(shape, generator=generator, dtype=torch.float64) + 0.1 for shape in shapes)
    return spread * cost, rows, cols * (rows.sum(1) / cols.sum(1))[:, None]


def tied(n: int, m: int) -> tuple[Tensor, Tensor, Tensor]:
    cost, rows, cols = problem(n, n, m)
    return (4 * cost).round() / 4, torch.ones_like(rows), torch.full_like(cols, n / m)


PROBLEMS = {
    "random": problem(0, 4, 4),
    "wide": problem(1, 4, 30),
    "tall": problem(2, 30, 4),
    "16": problem(3, 16, 16),
    "32 x 100": problem(4, 32, 100),
    "tied": tied(4, 4),
    "tied, wide": tied(6, 12),
    "constant": (torch.ones(2, 4, 4, dtype=torch.float64), *(torch.ones(2, 4, dtype=torch.float64) for _ in range(2))),
    "zero": (torch.zeros(2, 3, 5, dtype=torch.float64), *problem(5, 3, 5, 2)[1:]),
    "negative": (-100 * problem(6, 5, 5)[0], *problem(6, 5, 5)[1:]),
}


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("eps", [10.0, 1.0, 1e-2, 1e-4, 1e-6])
def test_plan_is_optimal(name: str, eps: float):
    """A feasible x minimises a convex f if and only if no feasible y has <grad f(x), y - x> < 0."""
    cost, rows, cols = PROBLEMS[name]
    plan = Quadratic(regularization=eps).plan(cost, rows, cols)
    torch.testing.assert_close(plan.sum(2), rows, atol=1e-9, rtol=0)
    torch.testing.assert_close(plan.sum(1), cols, atol=1e-9, rtol=0)
    assert plan.min() >= 0
    slope = cost + 2 * eps * plan
    best = Emd().plan(slope, rows, cols)
    gap = (slope * (plan - best)).sum((1, 2)) / (slope.abs().amax((1, 2)) * rows.sum(1))
    assert gap.max() < 1e-9


@pytest.mark.parametrize("name", ["random", "wide", "tied", "constant", "zero"])
@pytest.mark.parametrize("eps", [1.0, 1e-4])
def test_agrees_with_cvxpylayers(name: str, eps: float):
    cost, rows, cols = PROBLEMS[name]
    native = Quadratic(regularization=eps).plan(cost, rows, cols)
    torch.testing.assert_close(native, Cvxpy(regularization=eps).plan(cost, rows, cols), atol=1e-5, rtol=0)


def finite_difference(solver: TransportSolver, inputs: list[Tensor], moves: list[Tensor], weights: Tensor) -> float:
    step = 1e-4
    values = [
        (solver.plan(*(part + sign * step * move for part, move in zip(inputs, moves, strict=True))) * weights).sum()
        for sign in (1, -1)
    ]
    return ((values[0] - values[1]) / (2 * step)).item()


@pytest.mark.parametrize("eps", [1.0, 1e-4])
@pytest.mark.parametrize(("n", "m"), [(4, 4), (3, 7), (16, 16)])
def test_gradient_equals_finite_differences(eps: float, n: int, m: int):
    """Of cost and marginals; costs are spread over a few eps, so that many entries are positive."""
    cost, rows, cols = problem(n, n, m, groups=2, spread=2 * eps)
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(cost.shape, generator=generator, dtype=torch.float64)
    solver = Quadratic(regularization=eps)
    leaves = [part.clone().requires_grad_() for part in (cost, rows, cols)]
    plan = solver.plan(*leaves)
    assert (plan > 1e-3).sum() > 2 * (n + m)  # an interior solution, not a vertex
    gradients = torch.autograd.grad((plan * weights).sum(), leaves)
    zeros = [torch.zeros_like(part) for part in (cost, rows, cols)]
    for _ in range(6):
        move = eps * 0.01 * torch.randn(cost.shape, generator=generator, dtype=torch.float64)
        expected = finite_difference(solver, [cost, rows, cols], [move, *zeros[1:]], weights)
        assert (gradients[0] * move).sum().item() == pytest.approx(expected, rel=1e-5, abs=1e-9)
        moves = [torch.randn(part.shape, generator=generator, dtype=torch.float64) for part in (rows, cols)]
        moves = [0.01 * (one - one.mean(1, keepdim=True)) for one in moves]  # totals stay equal
        expected = finite_difference(solver, [cost, rows, cols], [zeros[0], *moves], weights)
        found = (gradients[1] * moves[0]).sum() + (gradients[2] * moves[1]).sum()
        assert found.item() == pytest.approx(expected, rel=1e-5, abs=1e-9)


def test_an_empty_row_and_column_beside_full_ones_leave_the_gradient_of_the_others():
    """Problems of a batch keep the rows of the fullest one, so the first one is solved with an empty row and column."""
    cost, rows, cols = problem(8, 4, 5, groups=2, spread=0.1)
    rows[0, 1] = cols[0, 2] = 0
    cols *= (rows.sum(1) / cols.sum(1))[:, None]
    row, col = torch.tensor([0, 2, 3]), torch.tensor([0, 1, 3, 4])
    small = cost[:1, row][:, :, col].clone()
    weights = torch.randn(cost.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    solver, both, alone = Quadratic(regularization=0.05), cost.requires_grad_(), small.requires_grad_()
    (found,) = torch.autograd.grad((solver.plan(both, rows, cols) * weights).sum(), both)
    plan = solver.plan(alone, rows[:1, row], cols[:1, col])
    (expected,) = torch.autograd.grad((plan * weights[:1, row][:, :, col]).sum(), alone)
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(found[:1, row][:, :, col], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["random", "wide", "tied"])
@pytest.mark.parametrize("mass", [1e-6, 1e6])
def test_a_plan_scales_with_its_masses(name: str, mass: float):
    """<c, m x> + eps / m |m x|^2 is m times <c, x> + eps |x|^2."""
    cost, rows, cols = PROBLEMS[name]
    expected = mass * Quadratic(regularization=0.01).plan(cost, rows, cols)
    found = Quadratic(regularization=0.01 / mass).plan(cost, mass * rows, mass * cols)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12 * mass)


@pytest.mark.parametrize("digits", [6, 8])
@pytest.mark.parametrize("unit", [1e-12, 1e-6, 1.0, 1e6])
def test_equals_plans_that_are_known_from_their_potentials(unit: float, digits: int):
    """A plan x is optimal if u_i + v_j - c_ij is 2 eps x_ij where x_ij > 0 and negative elsewhere."""
    generator = torch.Generator().manual_seed(0)

    def rand(*shape: int) -> Tensor:
        return torch.rand(50, *shape, generator=generator, dtype=torch.float64)

    plan = torch.where(rand(6, 7) < 0.5, 10 ** (-digits * rand(6, 7)), 0)
    cost = unit * (rand(6, 1) + rand(1, 7) - 2 * plan + torch.where(plan > 0, 0, rand(6, 7)))
    found = Quadratic(regularization=unit).plan(cost, plan.sum(2), plan.sum(1))
    torch.testing.assert_close(found, plan, rtol=0, atol=1e-12 if digits == 6 else 1e-10)  # `TOLERANCE` of the mass


@pytest.mark.parametrize("unit", [1e6, 1e9, 1e12, 1e15])
def test_an_empty_row_beside_large_costs(unit: float):
    """Problems of a batch keep empty rows and columns if another problem has full ones."""
    generator = torch.Generator().manual_seed(0)
    cost = torch.rand(4, 5, 5, generator=generator, dtype=torch.float64)
    rows = torch.rand(4, 5, generator=generator, dtype=torch.float64)
    rows[0, 1] = rows[1, 0] = rows[1, 3] = 0
    cols = rows.flip(1)
    plan = Quadratic(regularization=0.01).plan(unit * cost, rows, cols)
    torch.testing.assert_close((cost * plan).sum((1, 2)), (cost * Emd().plan(cost, rows, cols)).sum((1, 2)))


def test_an_eps_below_float_resolution_gives_the_linear_plan():
    cost, rows, cols = PROBLEMS["16"]
    plan = Quadratic(regularization=1e-13).plan(cost, rows, cols)
    torch.testing.assert_close((cost * plan).sum((1, 2)), (cost * Emd().plan(cost, rows, cols)).sum((1, 2)))


@pytest.mark.parametrize("size", [1, 2, 4, 6])
def test_an_assignment_is_the_optimum_exactly_where_the_interior_point_method_ends_at_it(size: int):
    generator = torch.Generator().manual_seed(size)
    labels = torch.randint(5, (200, size), generator=generator)  # classes occur twice, and some not at all
    cols = torch.zeros(200, 5, dtype=torch.float64).scatter_add_(1, labels, torch.ones(200, size, dtype=torch.float64))
    rows = torch.ones(200, size, dtype=torch.float64)
    cost = torch.rand(200, size, 5, generator=generator, dtype=torch.float64)
    column = best_assignment(cost, cols)
    shares: list[float] = []
    for eps in (1e-3, 0.03, 0.3):
        expected, support = interior_point(cost, rows, cols, eps)
        is_vertex = (expected.amax(2) > 1 - 1e-9).all(1)
        assert torch.equal(is_quadratic_optimum(cost, column, eps), is_vertex)
        shares.append(is_vertex.double().mean().item())
        leaf = cost.clone().requires_grad_()
        plan = Quadratic(regularization=eps).plan(leaf, rows, cols)
        torch.testing.assert_close(plan.detach(), expected, rtol=0, atol=1e-9)
        weights = torch.randn(plan.shape, generator=generator, dtype=torch.float64)
        wanted = with_implicit_gradient(leaf, rows, cols, expected, support.double() / (2 * eps))
        gradients = [torch.autograd.grad((of * weights).sum(), leaf)[0] for of in (plan, wanted)]
        torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-6)
    assert size == 1 or shares[0] > 0.8 > 0.3 > shares[2]  # both happen
