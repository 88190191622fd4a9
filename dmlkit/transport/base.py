"""The transport interface: plans between two discrete distributions, checked and reduced for every solver."""

from abc import ABC, abstractmethod
from importlib.util import find_spec
from math import isfinite
from typing import ClassVar

import torch
from torch import Tensor

from dmlkit.component import Component, ComponentConfig


class TransportConfig(ComponentConfig, frozen=True):
    """Root of the transport family."""

    moves: ClassVar[bool] = True
    """Whether plans have the requested sums; false for a solver that moves nothing."""

    @abstractmethod
    def build(self) -> "TransportSolver":
        """Return the solver."""


def check_installed(module: str, package: str, solver: str) -> None:
    """Check before training that the package of a solver is installed: POT and cvxpylayers take 425 MB."""
    if find_spec(module) is None:
        raise ValueError(
            f"{solver} needs {package}, which is not installed; install it with: pip install 'dmlkit[transport]'"
        )


class TransportSolver(Component, ABC, family=TransportConfig):
    r"""Optimal transport, batched over G independent problems; keeps the dtype and device of the cost.

    .. math:: \min_{x \ge 0} \langle c, x \rangle + R(x) \quad \text{s.t.} \quad
            \sum_j x_{ij} = \text{rows}_i, \; \sum_i x_{ij} = \text{cols}_j

    with a regularization R that depends on the solver. A subclass implements `solve`; `plan` checks the problem,
    computes in float64 and reduces it: a row or column with marginal 0 can only hold zeros, so it is dropped and
    its zeros are filled in afterwards. This is exact, not an approximation: a grouplet of k images and C classes
    (Zhang et al., CVPR 2022, eq. 1) is a problem of k x (at most k) however large C is.

    The gradient with respect to the marginals is defined for changes that keep both totals equal. Dropped rows and
    columns get gradient 0: a marginal of 0 is at the boundary, where the plan has no derivative.
    """

    def plan(self, cost: Tensor, rows: Tensor, cols: Tensor) -> Tensor:
        """Compute transport plans x (G, n, m) >= 0 with row sums ``rows`` and column sums ``cols``.

        Args:
            cost: (G, n, m), finite, of any floating dtype. On a GPU the checks take one synchronization.
            rows: (G, n) >= 0.
            cols: (G, m) >= 0, with the same total as ``rows`` in each problem, up to a relative 1e-6 (8 ulp for
                half-precision marginals); if they differ, the plan follows ``rows``.

        Returns:
            (G, n, m), in the dtype and on the device of ``cost``. A plan depends on the cost only up to a
            constant per row and per column, so 1 - s and -s give the same plan.

        Raises:
            ValueError: shapes or dtypes do not match, the batch is empty, a cost is not finite, a marginal is negative,
                or totals differ; the message names the entry.
        """
        name = type(self).__name__
        _check_shapes(name, cost, rows, cols)
        problem = cost.double(), rows.double(), cols.double()
        mismatch, row_count, col_count = _measure(name, *problem, torch.finfo(cost.dtype).eps)
        if row_count == 0:
            return torch.zeros_like(cost)
        return self._solve_reduced(*problem, mismatch, row_count, col_count).to(cost.dtype)

    def assignment(self, cost: Tensor, cols: Tensor) -> Tensor:
        """Compute `plan` for unit rows (G, n) and integer column sums (G, m), which the caller guarantees.

        A solver may override it to skip the checks, and so the wait for a GPU.
        """
        return self.plan(cost, cost.new_ones(cost.shape[:2]), cols)

    def _solve_reduced(
        self, cost: Tensor, rows: Tensor, cols: Tensor, mismatch: float, row_count: int, col_count: int
    ) -> Tensor:
        if mismatch > 0:
            totals = cols.detach().sum(1, keepdim=True)
            cols = cols * (rows.detach().sum(1, keepdim=True) / torch.where(totals > 0, totals, 1))
        groups, n, m = cost.shape
        if row_count < n:
            filled = _non_empty(rows, row_count)  # (G, n')
            across = filled[:, :, None].expand(-1, -1, m)
            plan = self._solve_reduced(cost.gather(1, across), rows.gather(1, filled), cols, 0, row_count, col_count)
            return plan.new_zeros(groups, n, m).scatter(1, across, plan)
        if col_count < m:
            filled = _non_empty(cols, col_count)  # (G, m')
            down = filled[:, None].expand(-1, n, -1)
            plan = self.solve(cost.gather(2, down), rows, cols.gather(1, filled))
            return plan.new_zeros(groups, n, m).scatter(2, down, plan)
        return self.solve(cost, rows, cols)

    @abstractmethod
    def solve(self, cost: Tensor, rows: Tensor, cols: Tensor) -> Tensor:
        """Compute the plans (G, n, m) of a checked float64 problem with equal totals.

        Problems of a batch keep different rows and columns, so some marginals may still be 0; the plan must be
        0 there. Some of the problems may be completely empty.
        """


def _non_empty(marginal: Tensor, count: int) -> Tensor:
    """Return indices (G, count) of the non-empty entries of marginal (G, n), in order, padded with empty ones."""
    return (marginal > 0).byte().argsort(stable=True, dim=1, descending=True)[:, :count]


def _check_shapes(name: str, cost: Tensor, rows: Tensor, cols: Tensor) -> None:
    if cost.ndim != 3 or cost.numel() == 0:
        raise ValueError(f"{name}: expected a cost of shape (G, n, m) with at least one entry, got {tuple(cost.shape)}")
    if not cost.is_floating_point():
        raise ValueError(f"{name}: expected a floating-point cost, got {cost.dtype}")
    groups, n, m = cost.shape
    for argument, marginal, size in (("rows", rows, n), ("cols", cols, m)):
        if marginal.shape != (groups, size):
            raise ValueError(f"{name}: expected {argument} of shape {(groups, size)}, got {tuple(marginal.shape)}")
        if marginal.dtype != cost.dtype or marginal.device != cost.device:
            raise ValueError(
                f"{name}: expected {argument} like the cost, {cost.dtype} on {cost.device}, "
                f"got {marginal.dtype} on {marginal.device}"
            )


@torch.no_grad()
def _measure(name: str, cost: Tensor, rows: Tensor, cols: Tensor, eps: float) -> tuple[float, int, int]:
    """Return the largest mismatch of totals and the largest numbers of non-empty rows and columns of a problem.

    Takes one synchronization on a GPU. The sum of the cost is finite if every entry is; a minimum propagates nan.
    """
    row_totals, col_totals = rows.sum(1), cols.sum(1)
    mismatch = (row_totals - col_totals).abs()
    excess = mismatch - max(1e-6, 8 * eps) * row_totals
    counts = (rows > 0).sum(1).amax(), (cols > 0).sum(1).amax()
    measured = torch.stack([cost.sum(), rows.amin(), cols.amin(), excess.amax(), mismatch.amax(), *counts]).tolist()
    total, row_low, col_low, worst, largest, row_count, col_count = measured
    if not (isfinite(total) and row_low >= 0 and col_low >= 0 and worst <= 0):
        _raise_error(name, cost, rows, cols, excess)
    return largest, int(row_count), int(col_count)


def _raise_error(name: str, cost: Tensor, rows: Tensor, cols: Tensor, excess: Tensor) -> None:
    for argument, value, valid, expected in (
        ("cost", cost, cost.isfinite(), "a finite cost"),
        ("rows", rows, rows.isfinite() & (rows >= 0), "0 or more"),
        ("cols", cols, cols.isfinite() & (cols >= 0), "0 or more"),
    ):
        if not valid.all():
            entry = (~valid).nonzero()[0].tolist()
            raise ValueError(f"{name}: expected {expected}, got {argument}{entry} = {value[tuple(entry)].item()}")
    if (excess > 0).any():
        group = int((excess > 0).nonzero()[0])
        raise ValueError(
            f"{name}: expected rows and cols with equal totals, got {rows[group].sum().item():.9g} and "
            f"{cols[group].sum().item():.9g} in problem {group}"
        )


class NoTransport(TransportSolver, name="none"):
    """Plans of zeros: the same groups without transport, as a control for the other solvers.

    x = 0, which does not satisfy the sums of rows and columns. With it, Grouplet's weights 1 + x are 1.

    Example:
        >>> NoTransport().plan(torch.rand(1, 2, 2), torch.ones(1, 2), torch.ones(1, 2))
        tensor([[[0., 0.],
                 [0., 0.]]])
    """

    moves: ClassVar[bool] = False

    def assignment(self, cost: Tensor, cols: Tensor) -> Tensor:
        return torch.zeros_like(cost)

    def solve(self, cost: Tensor, rows: Tensor, cols: Tensor) -> Tensor:
        return torch.zeros_like(cost)
