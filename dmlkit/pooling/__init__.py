"""Pooling: from a map of features to one vector. Each file holds one."""

from typing import Any

from dmlkit.component import load_family, missing_attribute

load_family(__name__)


def __getattr__(name: str) -> Any:
    raise missing_attribute(__name__, name)
