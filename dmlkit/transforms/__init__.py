"""Transforms from an image of any size to a normalized tensor, for training and for evaluation."""

from dmlkit.component import load_family
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
