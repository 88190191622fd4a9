"""The transport interface: plans between two discrete distributions, checked and presolved for every member."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from dmlkit.component import ComponentConfig


class TransportConfig(ComponentConfig, frozen=True):
    """Root of the transport family."""

    def build(self) -> "TransportSolver":
        """The solver."""
        raise NotImplementedError


class TransportSolver(ABC):
    r"""Optimal transport, batched over G independent problems; keeps the dtype and device of the cost.

    .. math:: \min_{x \ge 0} \langle c, x \rangle + R(x) \quad \text{s.t.} \quad
            \sum_j x_{ij} = \text{rows}_i, \; \sum_i x_{ij} = \text{cols}_j

    with a regularization R of the member's choice. A member implements `solve`; `plan` checks the problem,
    computes in float64 and presolves: a row or column with marginal 0 can only hold zeros, so it is dropped and
    its zeros are scattered back. This is exact, not an approximation: a grouplet of k images and C classes
    (Zhang et al., CVPR 2022, eq. 1) is a problem of k x (at most k) however large C is.

    The gradient for the marginals is defined on changes that keep both totals equal. Dropped rows and columns
    get gradient 0: a marginal of 0 is at the border, where the plan has no derivative.
    """

    def plan(self, cost: Tensor, rows: Tensor, cols: Tensor) -> Tensor:
        """Transport plans x (G, n, m) >= 0 with row sums ``rows`` and column sums ``cols``.

        Args:
            cost: (G, n, m), finite, of any floating dtype. On a GPU the checks cost one synchronisation.
            rows: (G, n) >= 0.
            cols: (G, m) >= 0, with the same total as ``rows`` in each problem, up to 1e-6 of it (8 ulp of
                half-precision marginals); the plan follows ``rows`` where they differ.

        Returns:
            (G, n, m), in the dtype and on the device of ``cost``. A plan depends on the cost only up to a
            constant per row and per column, so 1 - s and -s give the same one.

        Raises:
            ValueError: shapes or dtypes that do not fit, an empty batch, a cost that is not finite, a negative
                marginal, or totals that differ; it names the entry.
        """
        name = type(self).__name__
        _check_shapes(name, cost, rows, cols)
        row_count, col_count = _check_values(name, cost, rows, cols)
        if row_count == 0:
            return torch.zeros_like(cost)
        cost64, rows64, cols64 = cost.double(), rows.double(), cols.double()
        totals = cols64.detach().sum(1, keepdim=True)
        balance = rows64.detach().sum(1, keepdim=True) / torch.where(totals > 0, totals, 1)
        cols64 = cols64 * balance
        if (row_count, col_count) == cost.shape[1:]:
            return self.solve(cost64, rows64, cols64).to(cost.dtype)
        kept_rows, kept_cols = _non_empty(rows, row_count), _non_empty(cols, col_count)
        across = kept_rows[:, :, None].expand(-1, -1, cost.shape[2])  # (G, n', m)
        down = kept_cols[:, None, :].expand(-1, row_count, -1)  # (G, n', m')
        small = self.solve(
            cost64.gather(1, across).gather(2, down), rows64.gather(1, kept_rows), cols64.gather(1, kept_cols)
        )
        wide = small.new_zeros(len(cost), row_count, cost.shape[2]).scatter(2, down, small)
        return small.new_zeros(cost.shape).scatter(1, across, wide).to(cost.dtype)

    @abstractmethod
    def solve(self, cost: Tensor, rows: Tensor, cols: Tensor) -> Tensor:
        """The plans (G, n, m) of a checked float64 problem with equal totals.

        Problems of one batch keep different rows and columns, so some marginals may still be 0; the plan must be
        0 there. Some of the problems may be empty altogether.
        """


def _non_empty(marginal: Tensor, count: int) -> Tensor:
    """Indices (G, count) of the non-empty entries of marginal (G, n), in order, then of empty ones as padding."""
    return (marginal > 0).byte().argsort(stable=True, dim=1, descending=True)[:, :count]


def _check_shapes(name: str, cost: Tensor, rows: Tensor, cols: Tensor) -> None:
    if cost.ndim != 3 or cost.numel() == 0:
        raise ValueError(f"{name}: expected a cost of shape (G, n, m) with at least one entry, got {tuple(cost.shape)}")
    if not cost.is_floating_point():
        raise ValueError(f"{name}: expected a floating-point cost, got {cost.dtype}")
    groups, n, m = cost.shape
    for what, marginal, size in (("rows", rows, n), ("cols", cols, m)):
        if marginal.shape != (groups, size):
            raise ValueError(f"{name}: expected {what} of shape {(groups, size)}, got {tuple(marginal.shape)}")
        if marginal.dtype != cost.dtype or marginal.device != cost.device:
            raise ValueError(
                f"{name}: expected {what} like the cost, {cost.dtype} on {cost.device}, "
                f"got {marginal.dtype} on {marginal.device}"
            )


@torch.no_grad()
def _check_values(name: str, cost: Tensor, rows: Tensor, cols: Tensor) -> tuple[int, int]:
    """The largest number of non-empty rows and columns of a problem; one synchronisation on a GPU."""
    row_totals, col_totals = rows.double().sum(1), cols.double().sum(1)
    tolerance = max(1e-6, 8 * torch.finfo(cost.dtype).eps) * row_totals
    unequal = ~((row_totals - col_totals).abs() <= tolerance)  # true for nan as well
    faults = (~cost.isfinite()).sum() + (~(rows >= 0)).sum() + (~(cols >= 0)).sum() + unequal.sum()
    sizes = torch.stack([faults, (rows > 0).sum(1).max(), (cols > 0).sum(1).max()])
    fault_count, row_count, col_count = sizes.tolist()
    if fault_count == 0:
        return row_count, col_count
    for what, value, bad, expected in (
        ("cost", cost, ~cost.isfinite(), "a finite cost"),
        ("rows", rows, ~(rows >= 0), "0 or more"),
        ("cols", cols, ~(cols >= 0), "0 or more"),
    ):
        if bad.any():
            entry = bad.nonzero()[0].tolist()
            raise ValueError(f"{name}: expected {expected}, got {what}{entry} = {value[tuple(entry)].item()}")
    group = int(unequal.nonzero()[0])
    raise ValueError(
        f"{name}: expected rows and cols with equal totals, got {row_totals[group].item():.9g} and "
        f"{col_totals[group].item():.9g} in problem {group}"
    )
