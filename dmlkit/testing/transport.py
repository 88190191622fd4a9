"""The contract of transport solvers."""

import torch
from torch import Tensor

from dmlkit.testing.promise import expect, expect_close, expect_refused, hold
from dmlkit.transport.base import TransportConfig


def check_transport(config: TransportConfig) -> None:
    """Check a transport solver against its contract.

    Plans are non-negative and have the requested sums; a batch gives the same as its problems one by one, in value and
    gradient; dtype and device are kept; empty rows and columns may be dropped; constants per row and column change
    nothing; invalid problems raise errors. A solver that moves nothing is not checked for sums.

    Example:
        >>> from dmlkit.transport import Exact
        >>> check_transport(Exact.Config())
    """
    promises = [
        a_batch_equals_its_problems,
        dtype_and_device_are_kept,
        dropped_columns_pass_the_gradient,
        the_gradient_of_a_shared_input_is_the_sum,
        constants_per_row_and_column_change_nothing,
        inputs_are_left_alone,
        bad_problems_name_the_entry,
    ]
    if config.moves:
        promises = [marginals_hold, empty_rows_and_columns_are_dropped_exactly, *promises]
    hold(promises, config.name, config)


def expect_plan(plan: Tensor, rows: Tensor, cols: Tensor) -> None:
    """Check that a plan (G, n, m) is non-negative and has its sums, to 1e-6."""
    expect_close(plan.double().sum(2), rows.double(), "sums of the rows", atol=1e-6, rtol=0)
    expect_close(plan.double().sum(1), cols.double(), "sums of the columns", atol=1e-6, rtol=0)
    expect(plan.min() >= -1e-6, f"a plan contains {plan.min().item()}")


def marginals_hold(config: TransportConfig) -> None:
    """Check that rows and columns have their sums, for any shape and masses."""
    solver = config.build()
    for n, m in ((1, 1), (1, 5), (5, 1), (4, 4), (3, 9), (8, 3)):
        cost, rows, cols = random_problem(n * m, n=n, m=m)
        expect_plan(solver.plan(cost, rows, cols), rows, cols)
    for seed in range(10):  # integer masses and costs cause ties
        generator = torch.Generator().manual_seed(seed)
        cost = torch.randint(0, 3, (2, 3, 5), generator=generator).double() / 2
        rows = torch.randint(1, 3, (2, 3), generator=generator).double()
        cols = torch.randint(0, 3, (2, 5), generator=generator).double() + torch.eye(5, dtype=torch.float64)[0]
        cols *= (rows.sum(1) / cols.sum(1))[:, None]
        expect_plan(solver.plan(cost, rows, cols), rows, cols)


def a_batch_equals_its_problems(config: TransportConfig) -> None:
    """Check that the plans of a batch equal those of its problems one by one."""
    solver, (cost, rows, cols) = config.build(), random_problem(2)
    batch = solver.plan(cost, rows, cols)
    for group in range(len(cost)):
        own = slice(group, group + 1)
        expect_close(batch[own], solver.plan(cost[own], rows[own], cols[own]), f"problem {group}", atol=1e-6, rtol=0)


def dtype_and_device_are_kept(config: TransportConfig) -> None:
    """Check that the plan and the gradient have the dtype and the device of the cost."""
    cost = random_problem(3, n=3, m=3)[0]
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        ones = torch.ones(3, 3, dtype=dtype)
        leaf = cost.clone().to(dtype).requires_grad_()
        plan = config.build().plan(leaf, ones, ones)
        is_kept = plan.dtype == dtype and plan.device == leaf.device
        expect(is_kept, f"{dtype}: got a plan in {plan.dtype} on {plan.device}")
        (gradient,) = torch.autograd.grad((plan * plan).sum() + leaf.sum(), leaf)
        expect(gradient.dtype == dtype, f"{dtype}: the gradient has another dtype, {gradient.dtype}")
        expect(gradient.isfinite().all(), f"{dtype}: a gradient has nan or inf")


def empty_rows_and_columns_are_dropped_exactly(config: TransportConfig) -> None:
    """Check that rows and columns without mass are exactly 0, and solving with them gives the same plan."""
    solver, (cost, rows, cols) = config.build(), with_gaps()
    plan = solver.plan(cost, rows, cols)
    expect_plan(plan, rows, cols)
    of_empty = plan[(rows == 0)[:, :, None] | (cols == 0)[:, None]]
    expect((of_empty == 0).all(), "a row or column without mass has entries above 0")
    full = solver.solve(cost[:3], rows[:3], cols[:3])  # with its empty rows and columns
    expect_close(plan[:3], full, "solved with them", atol=1e-6, rtol=0)


def dropped_columns_pass_the_gradient(config: TransportConfig) -> None:
    """Check that additional empty columns change neither the plan nor its gradient."""
    solver, (cost, rows, cols) = config.build(), random_problem(5, n=4, m=4)
    weights = torch.randn(3, 4, 4, dtype=torch.float64)
    columns = torch.tensor([0, 2, 3, 6])
    wide_cost = torch.full((3, 4, 8), 0.3, dtype=torch.float64).index_copy(2, columns, cost).requires_grad_()
    wide_cols = torch.zeros(3, 8, dtype=torch.float64).index_copy(1, columns, cols)
    leaf = cost.clone().requires_grad_()
    narrow, wide = solver.plan(leaf, rows, cols), solver.plan(wide_cost, rows, wide_cols)
    expect_close(wide[:, :, columns], narrow, "plan", atol=1e-6, rtol=0)
    (expected,) = torch.autograd.grad((narrow * weights).sum() + 0 * leaf.sum(), leaf)
    (gradient,) = torch.autograd.grad((wide[:, :, columns] * weights).sum() + 0 * wide_cost.sum(), wide_cost)
    expect_close(gradient[:, :, columns], expected, "gradient", atol=1e-4, rtol=1e-4)


def the_gradient_of_a_shared_input_is_the_sum(config: TransportConfig) -> None:
    """Check that a cost shared by all problems gets the sum of their gradients; qpth gives the mean, 5 times less."""
    solver, (cost, rows, cols) = config.build(), random_problem(6, groups=5)
    weights = torch.randn(5, 4, 6, dtype=torch.float64)

    def gradient(shared: Tensor, group: slice) -> Tensor:
        leaf = shared.clone().requires_grad_()
        costs = leaf.expand(5, -1, -1)[group]
        plan = solver.plan(costs, rows[:1].expand(5, -1)[group], cols[:1].expand(5, -1)[group])
        return torch.autograd.grad((plan * weights[group]).sum() + 0 * leaf.sum(), leaf)[0]

    apart = sum(gradient(cost[0], slice(group, group + 1)) for group in range(5))
    expect_close(gradient(cost[0], slice(None)), apart, "gradient", atol=1e-4, rtol=1e-4)


def constants_per_row_and_column_change_nothing(config: TransportConfig) -> None:
    """Check that a constant added to the costs of a row or column does not change the plan."""
    solver, (cost, rows, cols) = config.build(), random_problem(7)
    shifted = cost + torch.randn(3, 4, 1, dtype=torch.float64) + torch.randn(3, 1, 6, dtype=torch.float64)
    expect_close(solver.plan(shifted, rows, cols), solver.plan(cost, rows, cols), "plan", atol=1e-6, rtol=0)


def inputs_are_left_alone(config: TransportConfig) -> None:
    """Check that cost, rows and columns are not changed."""
    problem = with_gaps()
    copies = [tensor.clone() for tensor in problem]
    config.build().plan(*problem)
    for name, tensor, copy in zip(("cost", "rows", "cols"), problem, copies, strict=True):
        expect(torch.equal(tensor, copy), f"{name} has changed")


def bad_problems_name_the_entry(config: TransportConfig) -> None:
    """Check that non-finite values, negative masses, unequal totals and wrong shapes raise a ValueError."""
    solver, (cost, rows, cols) = config.build(), random_problem(8)

    def spoiled(tensor: Tensor, entry: tuple[int, ...], value: float) -> Tensor:
        return tensor.index_put(tuple(torch.tensor(entry)), tensor.new_tensor(value))

    problems: dict[str, Problem] = {
        r"a finite cost, got cost\[2, 0, 5\] = nan": (spoiled(cost, (2, 0, 5), torch.nan), rows, cols),
        r"a finite cost, got cost\[0, 1, 0\] = -inf": (spoiled(cost, (0, 1, 0), -torch.inf), rows, cols),
        r"0 or more, got rows\[1, 3\] = -0.5": (cost, spoiled(rows, (1, 3), -0.5), cols),
        r"0 or more, got cols\[0, 2\] = nan": (cost, rows, spoiled(cols, (0, 2), torch.nan)),
        r"0 or more, got cols\[1, 1\] = -0.25": (cost, rows, spoiled(cols, (1, 1), -0.25)),
        r"0 or more, got rows\[0, 0\] = inf": (cost, spoiled(rows, (0, 0), torch.inf), cols),
        r"equal totals, got .* and .* in problem 2": (cost, rows, spoiled(cols, (2, 0), 9.0)),
        r"at least one entry, got \(0, 4, 6\)": (cost[:0], rows[:0], cols[:0]),
        r"at least one entry, got \(3, 4, 0\)": (cost[:, :, :0], rows, cols[:, :0]),
        r"shape \(G, n, m\)": (cost[0], rows, cols),
        r"rows of shape \(3, 4\), got \(3, 6\)": (cost, cols, cols),
        r"cols of shape \(3, 6\), got \(2, 6\)": (cost, rows, cols[:2]),
        r"floating-point cost, got torch.int64": (cost.long(), rows, cols),
        r"rows like the cost, torch.float64 on cpu, got torch.float32 on cpu": (cost, rows.float(), cols),
    }
    for message, problem in problems.items():
        pattern = f"^{type(solver).__name__}: .*{message}"
        expect_refused(lambda problem=problem: solver.plan(*problem), ValueError, pattern, message)


Problem = tuple[Tensor, Tensor, Tensor]
"""Cost (G, n, m), rows (G, n) and columns (G, m)."""


def random_problem(seed: int, groups: int = 3, n: int = 4, m: int = 6) -> Problem:
    """Return random problems with equal totals, in float64."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (groups, n, m), (groups, n), (groups, m)
    cost, rows, cols = (torch.rand(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return cost, rows, cols * (rows.sum(1) / cols.sum(1))[:, None]


def with_gaps() -> Problem:
    """Return a batch whose problems have different empty rows and columns; all of the last one are empty."""
    cost, rows, cols = random_problem(1, groups=4, n=5, m=7)
    cols[0, [0, 3]] = 0
    cols[1, 6] = 0
    rows[1, [0, 1]] = 0
    rows[2, 4] = 0
    rows[3], cols[3] = 0, 0
    totals = rows.sum(1) / cols.sum(1).clamp(min=1e-9)
    return cost, rows, cols * totals[:, None]
