"""ResNet-18, ResNet-50 and ResNet-101 of torchvision."""

from collections.abc import Iterable
from typing import Annotated, Literal

from torch import Tensor, nn

from dmlkit.backbones.base import Backbone, BackboneConfig, blocks_in
from dmlkit.backbones.pretrained.weights import (
    PublishedInput,
    build_torchvision,
    check_name,
    torchvision_input,
    torchvision_requirements,
)
from dmlkit.component import Requirement, one_of
from dmlkit.pooling import Avg, Pooling, PoolingConfig


class ResNet18Config(BackboneConfig, frozen=True):
    """ResNet-18 (He et al. 2016), 512 features."""

    name: Literal["resnet18"] = "resnet18"
    weights: str | None = None
    """``imagenet``, a name of torchvision weights, or the path of a file; null trains from scratch."""
    pooling: Annotated[PoolingConfig, one_of] = Avg.Config()
    """Pooling of the last feature map to one vector."""

    def create(self) -> "ResNet":
        return ResNet(18, weights=self.weights, pooling=self.pooling.build())

    def requirements(self) -> Iterable[Requirement]:
        return torchvision_requirements(self.weights)

    def check_weights(self) -> None:
        check_name(self.name, self.weights)

    def published_input(self) -> PublishedInput:
        return torchvision_input(self.name, self.weights)


class ResNet50Config(BackboneConfig, frozen=True):
    """ResNet-50 (He et al. 2016), 2 048 features; accepts files of SwAV's and DINO's self-supervised weights."""

    name: Literal["resnet50"] = "resnet50"
    weights: str | None = None
    """``imagenet``, a name of torchvision weights, or the path of a file; null trains from scratch."""
    pooling: Annotated[PoolingConfig, one_of] = Avg.Config()
    """Pooling of the last feature map to one vector."""

    def create(self) -> "ResNet":
        return ResNet(50, weights=self.weights, pooling=self.pooling.build())

    def requirements(self) -> Iterable[Requirement]:
        return torchvision_requirements(self.weights)

    def check_weights(self) -> None:
        check_name(self.name, self.weights)

    def published_input(self) -> PublishedInput:
        return torchvision_input(self.name, self.weights)


class ResNet101Config(BackboneConfig, frozen=True):
    """ResNet-101 (He et al. 2016), 2 048 features."""

    name: Literal["resnet101"] = "resnet101"
    weights: str | None = None
    """``imagenet``, a name of torchvision weights, or the path of a file; null trains from scratch."""
    pooling: Annotated[PoolingConfig, one_of] = Avg.Config()
    """Pooling of the last feature map to one vector."""

    def create(self) -> "ResNet":
        return ResNet(101, weights=self.weights, pooling=self.pooling.build())

    def requirements(self) -> Iterable[Requirement]:
        return torchvision_requirements(self.weights)

    def check_weights(self) -> None:
        check_name(self.name, self.weights)

    def published_input(self) -> PublishedInput:
        return torchvision_input(self.name, self.weights)


class ResNet(Backbone):
    """torchvision's ResNet up to its pooling.

    Args:
        depth: 18, 50 or 101.
        weights: see `dmlkit.backbones.pretrained.weights.build_torchvision`.
        pooling: pooling of the last feature map; None averages.

    Raises:
        UserError: the weights are unknown or cannot be downloaded or read.
    """

    def __init__(
        self, depth: Literal[18, 50, 101], *, weights: str | None = None, pooling: Pooling | None = None
    ) -> None:
        super().__init__()
        from torchvision import models

        build, enum = {
            18: (models.resnet18, models.ResNet18_Weights),
            50: (models.resnet50, models.ResNet50_Weights),
            101: (models.resnet101, models.ResNet101_Weights),
        }[depth]
        self.network, self.num_features = build_torchvision(build, enum, weights, "fc")
        self.network.avgpool = pooling or Avg()

    def blocks(self) -> list[nn.Module]:
        return blocks_in(self.network, "layer1", "layer2", "layer3", "layer4")

    def forward(self, images: Tensor) -> Tensor:
        return self.network(images)
