"""Backbones, which turn images into features; the networks of torchvision share a file."""

from dmlkit.backbones.base import Backbone, BackboneConfig
from dmlkit.backbones.bn_inception import BNInception, BNInceptionConfig
from dmlkit.backbones.identity import Identity, IdentityConfig
from dmlkit.backbones.small_cnn import SmallCNN, SmallCNNConfig
from dmlkit.backbones.timm import Timm, TimmConfig
from dmlkit.backbones.torchvision import (
    ConvNeXt,
    ConvNeXtConfig,
    GoogLeNet,
    GoogLeNetConfig,
    ResNet,
    ResNet18Config,
    ResNet50Config,
    ResNet101Config,
    ViT,
    ViTConfig,
)
from dmlkit.component import load_family

__all__ = [
    "BNInception",
    "BNInceptionConfig",
    "Backbone",
    "BackboneConfig",
    "ConvNeXt",
    "ConvNeXtConfig",
    "GoogLeNet",
    "GoogLeNetConfig",
    "Identity",
    "IdentityConfig",
    "ResNet",
    "ResNet18Config",
    "ResNet50Config",
    "ResNet101Config",
    "SmallCNN",
    "SmallCNNConfig",
    "Timm",
    "TimmConfig",
    "ViT",
    "ViTConfig",
]

load_family(__name__)
