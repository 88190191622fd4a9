"""Transport: optimal-transport solvers behind one interface. Each file holds one."""

from dmlkit.component import load_family
from dmlkit.transport.base import NoTransport, TransportConfig, TransportSolver
from dmlkit.transport.cvxpy import Cvxpy
from dmlkit.transport.emd import Emd
from dmlkit.transport.exact import Exact
from dmlkit.transport.quadratic import Quadratic
from dmlkit.transport.sinkhorn import Sinkhorn

__all__ = [
    "Cvxpy",
    "Emd",
    "Exact",
    "NoTransport",
    "Quadratic",
    "Sinkhorn",
    "TransportConfig",
    "TransportSolver",
]

load_family(__name__)
