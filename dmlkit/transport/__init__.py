"""Transport: optimal-transport solvers behind one interface. Each file holds one."""

from typing import TYPE_CHECKING

from dmlkit.component import load_family, missing_attribute
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

if not TYPE_CHECKING:  # otherwise every name would pass the type checker

    def __getattr__(name: str) -> object:
        raise missing_attribute(__name__, name)
