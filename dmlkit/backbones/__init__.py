"""Backbones, which turn images into features; the networks of torchvision share a file."""

from typing import TYPE_CHECKING

from dmlkit.component import import_on_demand

if TYPE_CHECKING:
    from dmlkit.backbones.base import Backbone, BackboneConfig
    from dmlkit.backbones.bn_inception import BNInception
    from dmlkit.backbones.identity import Identity, IdentityConfig
    from dmlkit.backbones.small_cnn import SmallCNN
    from dmlkit.backbones.timm import Timm
    from dmlkit.backbones.torchvision import ConvNeXt, GoogLeNet, ResNet18, ResNet50, ResNet101, ViT

__all__ = [
    "BNInception",
    "Backbone",
    "BackboneConfig",
    "ConvNeXt",
    "GoogLeNet",
    "Identity",
    "IdentityConfig",
    "ResNet18",
    "ResNet50",
    "ResNet101",
    "SmallCNN",
    "Timm",
    "ViT",
]

import_on_demand(__name__)
