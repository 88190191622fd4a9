"""Problems for the checks of transport solvers."""

from collections.abc import Iterator

import torch
from torch import Tensor

Problem = tuple[Tensor, Tensor, Tensor]
"""Cost (G, n, m), rows (G, n) and columns (G, m)."""


def random_problem(seed: int, groups: int = 3, n: int = 4, m: int = 6) -> Problem:
    """Return random problems with equal totals, in float64."""
    generator = torch.Generator().manual_seed(seed)
    cost, rows, cols = (
        torch.rand(shape, generator=generator, dtype=torch.float64)
        for shape in ((groups, n, m), (groups, n), (groups, m))
    )
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


def bad_problems() -> Iterator[tuple[str, Problem]]:
    """Yield invalid problems, each after a pattern of the error message."""
    cost, rows, cols = random_problem(8)

    def spoiled(tensor: Tensor, entry: tuple[int, ...], value: float) -> Tensor:
        tensor = tensor.clone()
        tensor[entry] = value
        return tensor

    yield r"a finite cost, got cost\[2, 0, 5\] = nan", (spoiled(cost, (2, 0, 5), torch.nan), rows, cols)
    yield r"a finite cost, got cost\[0, 1, 0\] = -inf", (spoiled(cost, (0, 1, 0), -torch.inf), rows, cols)
    yield r"0 or more, got rows\[1, 3\] = -0.5", (cost, spoiled(rows, (1, 3), -0.5), cols)
    yield r"0 or more, got cols\[0, 2\] = nan", (cost, rows, spoiled(cols, (0, 2), torch.nan))
    yield r"0 or more, got rows\[0, 0\] = inf", (cost, spoiled(rows, (0, 0), torch.inf), cols)
    yield r"equal totals, got .* and .* in problem 2", (cost, rows, spoiled(cols, (2, 0), 9.0))
    yield r"at least one entry, got \(0, 4, 6\)", (cost[:0], rows[:0], cols[:0])
    yield r"at least one entry, got \(3, 4, 0\)", (cost[:, :, :0], rows, cols[:, :0])
    yield r"shape \(G, n, m\)", (cost[0], rows, cols)
    yield r"rows of shape \(3, 4\), got \(3, 6\)", (cost, cols, cols)
    yield r"cols of shape \(3, 6\), got \(2, 6\)", (cost, rows, cols[:2])
    yield r"floating-point cost, got torch.int64", (cost.long(), rows, cols)
    yield r"rows like the cost, torch.float64 on cpu, got torch.float32 on cpu", (cost, rows.float(), cols)
