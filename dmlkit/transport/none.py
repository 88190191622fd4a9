"""No transport: a control that shows the effect of transport plans."""

from typing import ClassVar, Literal

import torch
from torch import Tensor

from dmlkit.transport.base import TransportConfig, TransportSolver


class NoTransportConfig(TransportConfig, frozen=True):
    """Plans of zeros: the same groups without transport, as a control for the other solvers."""

    moves: ClassVar[bool] = False
    name: Literal["none"] = "none"

    def build(self) -> "NoTransport":
        return NoTransport()


class NoTransport(TransportSolver):
    """x = 0, which does not satisfy the sums of rows and columns. With it, Grouplet's weights 1 + x are 1.

    Example:
        >>> NoTransport().plan(torch.rand(1, 2, 2), torch.ones(1, 2), torch.ones(1, 2))
        tensor([[[0., 0.],
                 [0., 0.]]])
    """

    def assignment(self, cost: Tensor, cols: Tensor) -> Tensor:
        return torch.zeros_like(cost)

    def solve(self, cost: Tensor, rows: Tensor, cols: Tensor) -> Tensor:
        return torch.zeros_like(cost)
