"""Transport: optimal-transport solvers behind one interface. Each file holds one."""

from typing import TYPE_CHECKING

from dmlkit.component import load_family, missing_attribute
from dmlkit.transport.base import NoTransport, NoTransportConfig, TransportConfig, TransportSolver
from dmlkit.transport.cvxpy import Cvxpy, CvxpyConfig
from dmlkit.transport.emd import Emd, EmdConfig
from dmlkit.transport.exact import Exact, ExactConfig
from dmlkit.transport.quadratic import Quadratic, QuadraticConfig
from dmlkit.transport.sinkhorn import Sinkhorn, SinkhornConfig

__all__ = [
    "Cvxpy",
    "CvxpyConfig",
    "Emd",
    "EmdConfig",
    "Exact",
    "ExactConfig",
    "NoTransport",
    "NoTransportConfig",
    "Quadratic",
    "QuadraticConfig",
    "Sinkhorn",
    "SinkhornConfig",
    "TransportConfig",
    "TransportSolver",
]

load_family(__name__)

if not TYPE_CHECKING:  # otherwise every name would pass the type checker

    def __getattr__(name: str) -> object:
        raise missing_attribute(__name__, name)
