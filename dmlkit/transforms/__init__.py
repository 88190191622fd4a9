"""Transforms from an image of any size to a normalized tensor, for training and for evaluation."""

from typing import TYPE_CHECKING

from dmlkit.component import load_family, missing_attribute
from dmlkit.transforms.base import Resizing, TransformConfig
from dmlkit.transforms.presets import (
    BNInceptionConfig,
    CgmlCarsConfig,
    HypViTConfig,
    ImageNetConfig,
    PlainConfig,
    PretrainedConfig,
)

__all__ = [
    "BNInceptionConfig",
    "CgmlCarsConfig",
    "HypViTConfig",
    "ImageNetConfig",
    "PlainConfig",
    "PretrainedConfig",
    "Resizing",
    "TransformConfig",
]

load_family(__name__)

if not TYPE_CHECKING:  # else every name would pass the type checker

    def __getattr__(name: str) -> object:
        raise missing_attribute(__name__, name)
