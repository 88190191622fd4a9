"""Time of a forward and backward pass of every transport solver compared with cvxpylayers and qpth; and their plans.

Run: python benchmarks/transport.py [--sizes 4 16 32] [--qpth-python /path/to/a/venv/with/qpth/bin/python]
"""

import argparse
import json
import subprocess
from collections.abc import Callable
from datetime import date
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import cvxpy
import torch
from cvxpylayers.torch.cvxpylayer import CvxpyLayer
from torch import Tensor

from dmlkit.transport import Cvxpy, Emd, Exact, Quadratic, Sinkhorn

HERE = Path(__file__).parent
GROUPS, CLASSES, REPEATS, EPS = 16, 100, 20, 1e-4
SLOW = 1.0  # seconds: a peer that needs longer is run 3 times instead of 20


def problem(size: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cost (G, k, C), rows (G, k), cols (G, C) of random grouplets, and labels (G, k)."""
    torch.manual_seed(0)
    labels = torch.randint(CLASSES, (GROUPS, size))
    cols = torch.zeros(GROUPS, CLASSES, dtype=dtype).scatter_add_(1, labels, torch.ones(GROUPS, size, dtype=dtype))
    similarity = torch.rand(GROUPS, size, CLASSES, dtype=dtype) * 1.2 - 0.2
    return 1 - similarity, torch.ones(GROUPS, size, dtype=dtype), cols, labels


def cvxpy_layer(n: int, m: int) -> CvxpyLayer:
    """The quadratic programme as a user of cvxpylayers writes it, with its default solver and tolerance."""
    cost, rows, cols, plan = cvxpy.Parameter((n, m)), cvxpy.Parameter(n), cvxpy.Parameter(m), cvxpy.Variable((n, m))
    objective = cvxpy.Minimize(cvxpy.sum(cvxpy.multiply(cost, plan)) + EPS * cvxpy.sum_squares(plan))
    constraints: list[Any] = [plan >= 0, cvxpy.sum(plan, axis=1) == rows, cvxpy.sum(plan, axis=0) == cols]
    return CvxpyLayer(cvxpy.Problem(objective, constraints), parameters=[cost, rows, cols], variables=[plan])


def time_pass(plan_of: Callable[[Tensor], Tensor], cost: Tensor) -> tuple[float, int]:
    """Median seconds of a forward and backward pass, and over how many runs."""
    weights = torch.randn(1).expand_as(cost)

    def once() -> float:
        leaf = cost.clone().requires_grad_()
        start = perf_counter()
        plan = plan_of(leaf)
        ((plan * weights).sum() + 0 * leaf.sum()).backward()  # the second term gives exact plans a graph, too
        return perf_counter() - start

    first = min(once(), once())
    runs = REPEATS if first < SLOW else 3
    return median(once() for _ in range(runs)), runs


def measure(size: int) -> dict[str, tuple[float, int]]:
    """Seconds and number of runs per solver for 16 grouplets of one size."""
    cost, rows, cols, labels = problem(size)
    reduced = cost.gather(2, labels[:, None].expand(-1, size, -1))  # (G, k, k)
    repeated = (labels[:, :, None] == labels[:, None]).tril(-1).any(2)
    counts = cols.gather(1, labels).masked_fill(repeated, 0)
    columns = labels[:, None].expand(-1, size, -1)

    def floor(leaf: Tensor) -> Tensor:
        return torch.zeros_like(leaf).scatter(2, columns, leaf.gather(2, columns).softmax(2))

    solvers: dict[str, Callable[[Tensor], Tensor]] = {
        "floor: gather k x k costs, softmax, scatter": floor,
        "exact": lambda leaf: Exact().plan(leaf, rows, cols),
        "quadratic": lambda leaf: Quadratic(regularization=EPS).plan(leaf, rows, cols),
        "quadratic, eps=0.1: plans within the polytope": lambda leaf: Quadratic(regularization=0.1).plan(
            leaf, rows, cols
        ),
        "sinkhorn, implicit": lambda leaf: Sinkhorn().plan(leaf, rows, cols),
        "sinkhorn, unrolled": lambda leaf: Sinkhorn(gradient="unrolled").plan(leaf, rows, cols),
        "emd (POT)": lambda leaf: Emd().plan(leaf, rows, cols),
    }
    times = {name: time_pass(solver, cost) for name, solver in solvers.items()}
    full, small = cvxpy_layer(size, CLASSES), cvxpy_layer(size, size)
    times["cvxpylayers, full"] = time_pass(lambda leaf: full(leaf, rows, cols)[0], cost)
    times["cvxpylayers, presolved"] = time_pass(lambda leaf: small(leaf, rows, counts)[0], reduced)
    return times


def measure_qpth(python: str, size: int) -> dict[str, tuple[float, int]]:
    """The same for qpth, on one thread, which wants numpy < 2 and so an interpreter of its own."""
    result = subprocess.run(
        [python, str(HERE / "qpth" / "transport.py"), str(size)],
        capture_output=True,
        text=True,
        check=True,
    )
    return {name: (seconds, runs) for name, (seconds, runs) in json.loads(result.stdout.splitlines()[-1]).items()}


def speed_table(size: int, times: dict[str, tuple[float, int]]) -> list[str]:
    full, small = times["cvxpylayers, full"][0], times["cvxpylayers, presolved"][0]
    lines = [
        f"### {GROUPS} grouplets of {size}, {CLASSES} classes, forward and backward",
        "",
        "| solver | ms | runs | speedup over cvxpylayers, full | speedup over cvxpylayers, presolved |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, (seconds, runs) in times.items():
        lines.append(f"| {name} | {seconds * 1e3:.2f} | {runs} | {full / seconds:.1f}x | {small / seconds:.1f}x |")
    return [*lines, ""]


def agreement_table() -> list[str]:
    """The largest difference between the plans of any two solvers, and each one's cost above the optimum."""
    cost, rows, cols, _ = problem(4, torch.float64)
    solvers = {
        "exact": Exact(),
        "emd": Emd(),
        "quadratic 1e-4": Quadratic(),
        "cvxpy 1e-4": Cvxpy(),
        "cvxpy 0": Cvxpy(regularization=0),
        "quadratic 0.1": Quadratic(regularization=0.1),
        "cvxpy 0.1": Cvxpy(regularization=0.1),
        "sinkhorn 0.05": Sinkhorn(),
        "sinkhorn 0.002": Sinkhorn(regularization=0.002, max_iterations=10_000),
    }
    plans = {name: solver.plan(cost, rows, cols) for name, solver in solvers.items()}
    best = (cost * plans["exact"]).sum()
    lines = [
        f"### Agreement: max |x - x'| over {GROUPS} grouplets of 4, {CLASSES} classes, float64",
        "",
        f"| | {' | '.join(plans)} | cost above the optimum |",
        "|---|" + "---:|" * (len(plans) + 1),
    ]
    for name, plan in plans.items():
        differences = " | ".join(f"{(plan - other).abs().max():.0e}" for other in plans.values())
        lines.append(f"| {name} | {differences} | {((cost * plan).sum() - best) / best:.1e} |")
    return [*lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[4, 16, 32])
    parser.add_argument("--qpth-python", help="an interpreter with torch, numpy < 2 and qpth")
    arguments = parser.parse_args()
    output = HERE / "results" / ("transport_qpth.md" if arguments.qpth_python else "transport.md")
    torch.set_num_threads(1)  # two threads wait for each other longer than these problems take; the peers keep theirs
    lines = [
        "# Transport solvers",
        "",
        f"{date.today()}, CPU, torch {torch.__version__}, {torch.get_num_threads()} thread (cvxpylayers: all)",
        f"Command: `python benchmarks/transport.py{' --qpth-python PYTHON' if arguments.qpth_python else ''}`",
        "",
        f"Median wall time of plan and gradient for a float32 cost; 3 runs instead of {REPEATS} above {SLOW:g} s.",
        f"cvxpylayers and qpth solve <c, x> + {EPS:g} |x|^2 with their default tolerances; presolved: only k x k.",
        "qpth runs on one thread: with two, torch 2.13 rejects the pivots that it passes to lu_solve."
        if arguments.qpth_python
        else "qpth, which needs a Python of its own, is in transport_qpth.md.",
        "",
    ]
    for size in arguments.sizes:
        times = measure(size)
        if arguments.qpth_python:
            times |= measure_qpth(arguments.qpth_python, size)
        lines += speed_table(size, times)
    lines += agreement_table()
    print("\n".join(lines))
    output.write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
