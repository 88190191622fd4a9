"""The transport interface: plans between two discrete distributions."""

from abc import ABC, abstractmethod

from torch import Tensor

from dmlkit.component import ComponentConfig


class TransportConfig(ComponentConfig, frozen=True):
    """Root of the transport family."""

    def build(self) -> "TransportSolver":
        """The solver."""
        raise NotImplementedError


class TransportSolver(ABC):
    """Optimal transport, batched over G independent problems; keeps the dtype and device of the cost."""

    @abstractmethod
    def plan(self, cost: Tensor, rows: Tensor, cols: Tensor) -> Tensor:
        """Transport plans x (G, n, m) of small <cost, x> with row sums ``rows`` and column sums ``cols``.

        Args:
            cost: (G, n, m), finite.
            rows: (G, n) >= 0.
            cols: (G, m) >= 0, with the same total as ``rows`` in each problem.
        """
