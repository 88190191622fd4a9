"""What every transport solver promises, whatever its file."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dmlkit.transport.base import TransportConfig, TransportSolver

NAMES = sorted(TransportConfig.variants)


@pytest.fixture(params=NAMES)
def solver(request: pytest.FixtureRequest) -> TransportSolver:
    return TransportConfig.variants[request.param]().build()


def random_problem(seed: int, groups: int = 3, n: int = 4, m: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    cost, rows, cols = (
        torch.rand(shape, generator=generator, dtype=torch.float64)
        for shape in ((groups, n, m), (groups, n), (groups, m))
    )
    return cost, rows, cols * (rows.sum(1) / cols.sum(1))[:, None]


def with_gaps() -> tuple[Tensor, Tensor, Tensor]:
    """Problems of one batch that miss different rows and columns; the last one misses all."""
    cost, rows, cols = random_problem(1, groups=4, n=5, m=7)
    cols[0, [0, 3]] = 0
    cols[1, 6] = 0
    rows[1, [0, 1]] = 0
    rows[2, 4] = 0
    rows[3], cols[3] = 0, 0
    totals = rows.sum(1) / cols.sum(1).clamp(min=1e-9)
    return cost, rows, cols * totals[:, None]


def check_plan(plan: Tensor, rows: Tensor, cols: Tensor) -> None:
    torch.testing.assert_close(plan.double().sum(2), rows.double(), atol=1e-6, rtol=0)
    torch.testing.assert_close(plan.double().sum(1), cols.double(), atol=1e-6, rtol=0)
    assert plan.min() >= -1e-6


def test_marginals_hold(solver: TransportSolver):
    for n, m in ((1, 1), (1, 5), (5, 1), (4, 4), (3, 9), (8, 3)):
        cost, rows, cols = random_problem(n * m, n=n, m=m)
        check_plan(solver.plan(cost, rows, cols), rows, cols)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=20, deadline=None, derandomize=True)
@given(data=st.data())
def test_marginals_hold_for_any(name: str, data: st.DataObject):
    masses = st.floats(0.01, 4).map(lambda mass: round(mass, 3)) | st.just(0.0) | st.sampled_from([1.0, 2.0])
    rows = data.draw(st.lists(masses, min_size=1, max_size=5).filter(lambda values: sum(values) > 0))
    shares = data.draw(st.lists(masses, min_size=1, max_size=6).filter(lambda values: sum(values) > 0))
    costs = st.sampled_from([0.0, 0.5, 1.0]) | st.floats(-1, 2)
    size = len(rows) * len(shares)
    cost = data.draw(st.lists(costs, min_size=size, max_size=size))
    row_tensor = torch.tensor([rows], dtype=torch.float64)
    col_tensor = torch.tensor([shares], dtype=torch.float64)
    col_tensor *= row_tensor.sum() / col_tensor.sum()
    plan = (
        TransportConfig.variants[name]()
        .build()
        .plan(torch.tensor(cost, dtype=torch.float64).view(1, len(rows), len(shares)), row_tensor, col_tensor)
    )
    check_plan(plan, row_tensor, col_tensor)


def test_batch_equals_loop(solver: TransportSolver):
    cost, rows, cols = random_problem(2)
    batch = solver.plan(cost, rows, cols)
    for group in range(len(cost)):
        one = slice(group, group + 1)
        torch.testing.assert_close(batch[one], solver.plan(cost[one], rows[one], cols[one]), atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_dtype_and_device_are_kept(solver: TransportSolver, dtype: torch.dtype):
    cost = random_problem(3, n=3, m=3)[0]
    ones = torch.ones(3, 3, dtype=dtype)
    leaf = cost.to(dtype).requires_grad_()
    plan = solver.plan(leaf, ones, ones)
    assert plan.dtype == dtype and plan.device == leaf.device
    ((plan * plan).sum() + leaf.sum()).backward()
    assert leaf.grad is not None and leaf.grad.dtype == dtype and leaf.grad.isfinite().all()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_gpu_equals_cpu(solver: TransportSolver):
    for problem in (random_problem(4), with_gaps()):
        plan = solver.plan(*(part.cuda() for part in problem))
        assert plan.is_cuda
        torch.testing.assert_close(plan.cpu(), solver.plan(*problem), atol=1e-6, rtol=0)


def test_presolve_is_exact(solver: TransportSolver):
    cost, rows, cols = with_gaps()
    plan = solver.plan(cost, rows, cols)
    check_plan(plan, rows, cols)
    assert (plan[(rows == 0)[:, :, None] | (cols == 0)[:, None]].abs() == 0).all()
    full = solver.solve(cost[:3], rows[:3], cols[:3])  # with its empty rows and columns
    torch.testing.assert_close(plan[:3], full, atol=1e-6, rtol=0)


def test_presolve_passes_the_gradient(solver: TransportSolver):
    cost, rows, cols = random_problem(5, n=4, m=4)
    weights = torch.randn(3, 4, 4, dtype=torch.float64)
    kept = torch.tensor([0, 2, 3, 6])
    wide_cost = torch.full((3, 4, 8), 0.3, dtype=torch.float64).index_copy(2, kept, cost).requires_grad_()
    wide_cols = torch.zeros(3, 8, dtype=torch.float64).index_copy(1, kept, cols)
    leaf = cost.clone().requires_grad_()
    narrow, wide = solver.plan(leaf, rows, cols), solver.plan(wide_cost, rows, wide_cols)
    torch.testing.assert_close(wide[:, :, kept], narrow, atol=1e-6, rtol=0)
    (expected,) = torch.autograd.grad((narrow * weights).sum() + 0 * leaf.sum(), leaf)
    (gradient,) = torch.autograd.grad((wide[:, :, kept] * weights).sum() + 0 * wide_cost.sum(), wide_cost)
    torch.testing.assert_close(gradient[:, :, kept], expected, atol=1e-4, rtol=1e-4)


def test_gradient_of_a_shared_input_is_the_sum(solver: TransportSolver):
    """qpth averages it: 5 times too small for 5 problems."""
    cost, rows, cols = random_problem(6, groups=5)
    weights = torch.randn(5, 4, 6, dtype=torch.float64)

    def gradient(shared: Tensor, group: slice) -> Tensor:
        leaf = shared.clone().requires_grad_()
        costs = leaf.expand(5, -1, -1)[group]
        plan = solver.plan(costs, rows[:1].expand(5, -1)[group], cols[:1].expand(5, -1)[group])
        return torch.autograd.grad((plan * weights[group]).sum() + 0 * leaf.sum(), leaf)[0]

    apart = sum(gradient(cost[0], slice(group, group + 1)) for group in range(5))
    torch.testing.assert_close(gradient(cost[0], slice(None)), apart, atol=1e-4, rtol=1e-4)


def test_constants_per_row_and_column_change_nothing(solver: TransportSolver):
    cost, rows, cols = random_problem(7)
    shifted = cost + torch.randn(3, 4, 1, dtype=torch.float64) + torch.randn(3, 1, 6, dtype=torch.float64)
    torch.testing.assert_close(solver.plan(shifted, rows, cols), solver.plan(cost, rows, cols), atol=1e-6, rtol=0)


def test_inputs_are_left_alone(solver: TransportSolver):
    problem = with_gaps()
    copies = [part.clone() for part in problem]
    solver.plan(*problem)
    for part, copy in zip(problem, copies, strict=True):
        assert torch.equal(part, copy)


def test_bad_problems_name_the_entry(solver: TransportSolver):
    name = type(solver).__name__
    cost, rows, cols = random_problem(8)

    def fails(message: str, cost: Tensor = cost, rows: Tensor = rows, cols: Tensor = cols) -> None:
        with pytest.raises(ValueError, match=message) as caught:
            solver.plan(cost, rows, cols)
        assert str(caught.value).startswith(f"{name}: ")

    def changed(tensor: Tensor, entry: tuple[int, ...], value: float) -> Tensor:
        tensor = tensor.clone()
        tensor[entry] = value
        return tensor

    fails(r"a finite cost, got cost\[2, 0, 5\] = nan", cost=changed(cost, (2, 0, 5), torch.nan))
    fails(r"a finite cost, got cost\[0, 1, 0\] = -inf", cost=changed(cost, (0, 1, 0), -torch.inf))
    fails(r"0 or more, got rows\[1, 3\] = -0.5", rows=changed(rows, (1, 3), -0.5))
    fails(r"0 or more, got cols\[0, 2\] = nan", cols=changed(cols, (0, 2), torch.nan))
    fails(r"0 or more, got rows\[0, 0\] = inf", rows=changed(rows, (0, 0), torch.inf))
    fails(r"equal totals, got .* and .* in problem 2", cols=changed(cols, (2, 0), 9.0))
    fails(r"at least one entry, got \(0, 4, 6\)", cost=cost[:0], rows=rows[:0], cols=cols[:0])
    fails(r"at least one entry, got \(3, 4, 0\)", cost=cost[:, :, :0], cols=cols[:, :0])
    fails(r"shape \(G, n, m\)", cost=cost[0])
    fails(r"rows of shape \(3, 4\), got \(3, 6\)", rows=cols)
    fails(r"cols of shape \(3, 6\), got \(2, 6\)", cols=cols[:2])
    fails(r"floating-point cost, got torch.int64", cost=cost.long())
    fails(r"rows like the cost, torch.float64 on cpu, got torch.float32 on cpu", rows=rows.float())
