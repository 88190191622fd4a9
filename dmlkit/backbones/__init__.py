"""Backbones, which turn images into features; one file per backbone."""

from dmlkit.backbones.base import Backbone, BackboneConfig
from dmlkit.backbones.bn_inception import BNInception, BNInceptionConfig
from dmlkit.backbones.convnext import ConvNeXt, ConvNeXtConfig
from dmlkit.backbones.googlenet import GoogLeNet, GoogLeNetConfig
from dmlkit.backbones.identity import Identity, IdentityConfig
from dmlkit.backbones.resnet import ResNet, ResNet18Config, ResNet50Config, ResNet101Config
from dmlkit.backbones.small_cnn import SmallCNN, SmallCNNConfig
from dmlkit.backbones.timm import Timm, TimmConfig
from dmlkit.backbones.vit import ViT, ViTConfig
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
