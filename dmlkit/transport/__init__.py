"""Transport: optimal-transport solvers behind one interface."""

from dmlkit.component import load_family
from dmlkit.transport.base import NoTransport, TransportConfig, TransportSolver
from dmlkit.transport.members import Cvxpy, Emd, Exact, Quadratic, Sinkhorn

__all__ = ["Cvxpy", "Emd", "Exact", "NoTransport", "Quadratic", "Sinkhorn", "TransportConfig", "TransportSolver"]

load_family(__name__)
