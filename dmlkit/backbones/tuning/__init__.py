"""Tuning: which weights of a backbone train. Each file holds one way."""

from typing import Any

from dmlkit.component import load_family, missing_attribute

load_family(__name__)


def __getattr__(name: str) -> Any:
    raise missing_attribute(__name__, name)
