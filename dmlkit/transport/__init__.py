"""Transport: optimal-transport solvers behind one interface."""

from typing import TYPE_CHECKING

from dmlkit.component import import_on_demand

if TYPE_CHECKING:
    from dmlkit.transport.base import NoTransport, TransportConfig, TransportSolver
    from dmlkit.transport.members import Cvxpy, Emd, Exact, Quadratic, Sinkhorn

__all__ = ["Cvxpy", "Emd", "Exact", "NoTransport", "Quadratic", "Sinkhorn", "TransportConfig", "TransportSolver"]

import_on_demand(__name__)
