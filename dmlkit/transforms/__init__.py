"""Transforms from an image of any size to a normalized tensor, for training and for evaluation."""

from typing import TYPE_CHECKING

from dmlkit.component import import_on_demand

if TYPE_CHECKING:
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

import_on_demand(__name__)
