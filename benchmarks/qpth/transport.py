"""Time qpth on the grouplet programme; run by benchmarks/transport.py in an environment with numpy < 2.

Prints {name: [seconds, runs]} as JSON. The full programme is skipped above size 4: k * 100 variables a problem as
dense matrices take minutes.
"""

import json
import sys
from statistics import median
from time import perf_counter

import torch
from qpth.qp import QPFunction, QPSolvers

GROUPS, CLASSES, EPS = 16, 100, 1e-4


def constraints(n: int, m: int) -> torch.Tensor:
    """The (n + m - 1, n m) matrix of row and column sums; the last column sum follows from the others."""
    rows = torch.eye(n, dtype=torch.float64).repeat_interleave(m, 1)
    cols = torch.eye(m, dtype=torch.float64).repeat(1, n)
    return torch.cat([rows, cols[:-1]])


def time_pass(cost: torch.Tensor, cols: torch.Tensor) -> tuple[float, int]:
    groups, n, m = cost.shape
    quadratic = 2 * EPS * torch.eye(n * m, dtype=torch.float64)
    inequality, zeros = -torch.eye(n * m, dtype=torch.float64), torch.zeros(n * m, dtype=torch.float64)
    equality = constraints(n, m)
    marginals = torch.cat([torch.ones(groups, n, dtype=torch.float64), cols[:, :-1]], 1)
    solve = QPFunction(verbose=-1, solver=QPSolvers.PDIPM_BATCHED)

    def once() -> float:
        leaf = cost.clone().requires_grad_()
        start = perf_counter()
        solve(quadratic, leaf.flatten(1), inequality, zeros, equality, marginals).square().sum().backward()
        return perf_counter() - start

    first = once()
    if first > 10:
        return first, 1
    runs = 20 if first < 1 else 3
    return median(once() for _ in range(runs)), runs


def main() -> None:
    size = int(sys.argv[1])
    torch.set_num_threads(1)  # with two, torch 2.13 refuses the pivots of its batched factorisation
    torch.manual_seed(0)
    labels = torch.stack([torch.randperm(CLASSES)[:size] for _ in range(GROUPS)])
    cost = 1 - (torch.rand(GROUPS, size, CLASSES, dtype=torch.float64) * 1.2 - 0.2)
    cols = torch.zeros(GROUPS, CLASSES, dtype=torch.float64).scatter_(1, labels, 1)
    reduced = cost.gather(2, labels[:, None].expand(-1, size, -1))
    times = {"qpth, full": time_pass(cost, cols)} if size <= 4 else {}
    times["qpth, presolved"] = time_pass(reduced, torch.ones(GROUPS, size, dtype=torch.float64))
    print(json.dumps(times))


if __name__ == "__main__":
    main()
