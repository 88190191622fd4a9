"""Solvers of linear transport against linear programs and POT, and what they need."""

import importlib.util

import numpy as np
import ot
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment, linprog
from torch import Tensor

from dmlkit.transport import Cvxpy, Emd, Exact, Sinkhorn, base
from tests.conftest import TINY_RECIPE
from tests.transport.test_quadratic import problem as positive_problem

Problem = tuple[Tensor, Tensor, Tensor]


def balanced(rows: Tensor, cols: Tensor) -> Tensor:
    return cols * (rows.sum(1) / cols.sum(1))[:, None]


def problem(kind: str, n: int, m: int, groups: int = 3) -> Problem:
    generator = torch.Generator().manual_seed(n * 1000 + m)

    def rand(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    cost, rows, cols = rand(groups, n, m), rand(groups, n), rand(groups, m)
    if kind == "tied":  # few distinct costs, whole marginals where they fit
        cost, rows, cols = (3 * cost).round(), torch.ones_like(rows), torch.full_like(cols, n / m)
    if kind == "constant":
        cost = torch.ones_like(cost)
    if kind == "degenerate":  # partial sums of rows and columns coincide
        rows, cols = (1 + 3 * rows).round(), (1 + 3 * cols).round()
        cols[:, 0] += (rows.sum(1) - cols.sum(1)).clamp(min=0)
        rows[:, 0] += (cols.sum(1) - rows.sum(1)).clamp(min=0)
    if kind == "negative":
        cost = 100 * (cost - 0.5)
    if kind == "grouplet":  # unit rows, label counts as columns
        labels = torch.randint(m, (groups, n), generator=generator)
        rows, cols = torch.ones_like(rows), torch.nn.functional.one_hot(labels, m).sum(1).double()
    return cost, rows, balanced(rows, cols)


KINDS = ["random", "tied", "constant", "degenerate", "negative", "grouplet"]
SIZES = [(1, 1), (5, 3), (6, 6), (4, 100), (8, 8), (32, 32), (32, 100), (20, 7)]


def lowest_cost(cost: Tensor, rows: Tensor, cols: Tensor) -> float:
    """The optimum of one problem by scipy's linear programming."""
    n, m = cost.shape
    sums = np.concatenate([np.kron(np.eye(n), np.ones((1, m))), np.kron(np.ones((1, n)), np.eye(m))])
    return linprog(cost.flatten().numpy(), A_eq=sums, b_eq=torch.cat([rows, cols]).numpy(), method="highs").fun


def components(support: Tensor) -> int:
    """Connected parts of the bipartite graph of a support (n, m), by union-find."""
    n, m = support.shape
    parent = list(range(n + m))

    def root(node: int) -> int:
        while parent[node] != node:
            node = parent[node]
        return node

    for row, col in support.nonzero().tolist():
        parent[root(row)] = root(n + col)
    return len({root(node) for node in range(n + m)})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "m"), SIZES)
def test_exact_is_an_optimal_vertex(kind: str, n: int, m: int):
    cost, rows, cols = problem(kind, n, m)
    plan = Exact().plan(cost, rows, cols)
    reference = Emd().plan(cost, rows, cols)
    torch.testing.assert_close(plan.sum(2), rows, atol=1e-9, rtol=0)
    torch.testing.assert_close(plan.sum(1), cols, atol=1e-9, rtol=0)
    assert plan.min() >= 0
    torch.testing.assert_close((cost * plan).sum((1, 2)), (cost * reference).sum((1, 2)), rtol=1e-9, atol=1e-9)
    for support in plan > 1e-9:
        assert support.sum() == n + m - components(support)  # a forest: no cycle, so a vertex
    if kind == "grouplet":
        assert torch.equal(plan, plan.round())


@pytest.mark.parametrize("solver", [Emd(), Cvxpy(regularization=0)])
@pytest.mark.parametrize("kind", KINDS)
def test_cost_is_the_optimum_of_linprog(solver: Emd | Cvxpy, kind: str):
    for n, m in ((3, 3), (7, 5)):
        cost, rows, cols = problem(kind, n, m)
        expected = [lowest_cost(*one) for one in zip(cost, rows, cols, strict=True)]
        found = (cost * solver.plan(cost, rows, cols)).sum((1, 2))
        torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("size", [2, 5, 6, 7, 32])
def test_assignment_equals_scipy(size: int):
    cost = torch.rand(4, size, size, generator=torch.Generator().manual_seed(size), dtype=torch.float64)
    ones = torch.ones(4, size, dtype=torch.float64)
    plan = Exact().plan(cost, ones, ones)
    for group in range(4):
        rows, cols = linear_sum_assignment(cost[group].numpy())
        expected = torch.zeros(size, size, dtype=torch.float64)
        expected[rows, cols] = 1
        assert torch.equal(plan[group], expected)


@pytest.mark.parametrize("size", [2, 6, 7])
def test_an_assignment_is_the_plan_also_where_costs_are_equal(size: int):
    cost, rows, cols = problem("grouplet", size, 4)
    cost = (2 * cost).round()  # many plans have the lowest cost
    assert torch.equal(Exact().assignment(cost, cols), Exact().plan(cost, rows, cols))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_marginals(data: st.DataObject):
    n, m = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9))
    mass = st.sampled_from([0.0, 1.0, 1.0, 2.0, 0.5, 1e-3, 1 / 3]) | st.floats(0.001, 10)
    rows = data.draw(st.lists(mass, min_size=n, max_size=n).filter(any))
    cols = data.draw(st.lists(mass, min_size=m, max_size=m).filter(any))
    cost = data.draw(st.lists(st.integers(-2, 2) | st.floats(-1, 1), min_size=n * m, max_size=n * m))
    row_tensor, col_tensor = torch.tensor([rows], dtype=torch.float64), torch.tensor([cols], dtype=torch.float64)
    col_tensor = balanced(row_tensor, col_tensor)
    cost_tensor = torch.tensor(cost, dtype=torch.float64).view(1, n, m)
    plan = Exact().plan(cost_tensor, row_tensor, col_tensor)
    total = row_tensor.sum().item()
    torch.testing.assert_close(plan.sum(2), row_tensor, atol=1e-9 * total, rtol=0)
    torch.testing.assert_close(plan.sum(1), col_tensor, atol=1e-9 * total, rtol=0)
    expected = lowest_cost(cost_tensor[0], row_tensor[0], col_tensor[0])
    assert (cost_tensor * plan).sum().item() == pytest.approx(expected, abs=1e-7 * total)


@pytest.mark.parametrize("solver", [Exact(), Emd()])
def test_no_gradient(solver: Exact | Emd):
    cost = torch.rand(2, 3, 3, requires_grad=True)
    assert not solver.plan(cost, torch.ones(2, 3), torch.ones(2, 3)).requires_grad


def test_empty_rows_and_columns_are_left_out_of_the_problem(monkeypatch: pytest.MonkeyPatch):
    shapes: list[tuple[int, ...]] = []
    solve = Exact.solve

    def noted(self: Exact, cost: Tensor, rows: Tensor, cols: Tensor) -> Tensor:
        shapes.append(tuple(cost.shape))
        return solve(self, cost, rows, cols)

    monkeypatch.setattr(Exact, "solve", noted)
    Exact().plan(torch.rand(1, 4, 5), torch.tensor([[1.0, 0, 1, 0]]), torch.tensor([[0, 2.0, 0, 0, 0]]))
    assert shapes == [(1, 2, 1)]


@pytest.mark.parametrize("eps", [1.0, 0.1, 0.02])
def test_agrees_with_pots_single_solver(eps: float):
    cost, rows, cols = positive_problem(0, 4, 6)
    plan = Sinkhorn(regularization=eps, max_iterations=10_000).plan(cost, rows, cols)
    for group in range(3):
        arrays = rows[group].numpy(), cols[group].numpy(), cost[group].numpy()
        expected = ot.sinkhorn(*arrays, eps, method="sinkhorn_log", numItermax=100_000, stopThr=1e-12)
        torch.testing.assert_close(plan[group], torch.from_numpy(expected), atol=1e-7, rtol=0)


@pytest.mark.parametrize("gradient", ["implicit", "unrolled"])
@pytest.mark.parametrize("eps", [1.0, 0.1])
def test_gradient_equals_finite_differences(gradient: str, eps: float):
    cost, rows, cols = positive_problem(0, 4, 6, groups=2)
    solver = Sinkhorn(regularization=eps, max_iterations=10_000, gradient=gradient)
    balance = torch.eye(4, dtype=torch.float64) - 0.25  # moves that keep the total

    def plan(cost: Tensor, moves: Tensor) -> Tensor:
        return solver.plan(cost, rows + moves @ balance, cols)

    inputs = cost.requires_grad_(), torch.zeros(2, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(plan, inputs, atol=1e-5, rtol=1e-3)


def test_envelope_is_a_constant():
    cost, rows, cols = positive_problem(0, 4, 6)
    assert not Sinkhorn(gradient="envelope").plan(cost.requires_grad_(), rows, cols).requires_grad


def test_marginals_hold_when_the_iterations_run_out():
    cost, rows, cols = positive_problem(0, 4, 6)
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


@pytest.fixture
def without_extra(monkeypatch: pytest.MonkeyPatch):
    def find(name: str):
        return None if name in ("ot", "cvxpylayers") else importlib.util.find_spec(name)

    monkeypatch.setattr(base, "find_spec", find)


@pytest.mark.usefixtures("without_extra")
@pytest.mark.parametrize(("solver", "package"), [("sinkhorn", "POT"), ("emd", "POT"), ("cvxpy", "cvxpylayers")])
def test_a_solver_names_the_extra_before_training(solver, package, tmp_path, dmlkit):
    recipe = TINY_RECIPE.replace("{name: proxy_anchor}", f"{{name: grouplet, solver: {{name: {solver}}}}}")
    (tmp_path / "tiny.yaml").write_text(recipe)
    result = dmlkit("train", tmp_path / "tiny.yaml", "-o", tmp_path / "run")
    assert result.code == 2 and not (tmp_path / "run").exists()
    line = f"loss: {solver} needs {package}, which is not installed; install it with: pip install 'dmlkit[transport]'\n"
    assert result.err.endswith(line) and result.err.count("\n") == 1
