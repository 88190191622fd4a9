"""Backbones, which turn images into features; the networks of torchvision share a file."""

from dmlkit.backbones.base import Backbone, BackboneConfig
from dmlkit.backbones.bn_inception import BNInception
from dmlkit.backbones.identity import Identity, IdentityConfig
from dmlkit.backbones.small_cnn import SmallCNN
from dmlkit.backbones.timm import Timm
from dmlkit.backbones.torchvision import ConvNeXt, GoogLeNet, ResNet18, ResNet50, ResNet101, ViT
from dmlkit.component import load_family

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

load_family(__name__)
