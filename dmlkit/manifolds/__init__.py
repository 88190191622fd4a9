"""Manifolds: the geometry that embeddings live in. Each file holds one thin adapter over geoopt."""

import warnings
from typing import Any

from dmlkit.component import load_family, missing_attribute

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.jit")  # geoopt 0.5.1 scripts functions
    load_family(__name__)


def __getattr__(name: str) -> Any:
    raise missing_attribute(__name__, name)
