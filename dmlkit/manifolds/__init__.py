"""Manifolds: the geometry that embeddings live in. Each file holds one thin adapter over geoopt."""

from typing import Any

from dmlkit.component import load_family, missing_attribute

load_family(__name__)


def __getattr__(name: str) -> Any:
    raise missing_attribute(__name__, name)
