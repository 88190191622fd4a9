"""Transforms: from an image of any size to a normalised tensor, for training and for evaluation."""

from typing import Any

from dmlkit.component import load_family, missing_attribute

load_family(__name__)


def __getattr__(name: str) -> Any:
    raise missing_attribute(__name__, name)
