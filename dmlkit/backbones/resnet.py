"""ResNet-18, ResNet-50 and ResNet-101 of torchvision."""

from typing import Literal

from torch import Tensor, nn

from dmlkit.backbones.base import Backbone, blocks_in
from dmlkit.backbones.torchvision import TorchvisionConfig, build_torchvision
from dmlkit.pooling import Avg, Pooling


class ResNet18Config(TorchvisionConfig, frozen=True):
    """ResNet-18 (He et al. 2016), 512 features."""

    name: Literal["resnet18"] = "resnet18"

    def create(self) -> "ResNet":
        return ResNet(18, weights=self.weights, pooling=self.pooling.build())


class ResNet50Config(TorchvisionConfig, frozen=True):
    """ResNet-50 (He et al. 2016), 2 048 features; accepts files of SwAV's and DINO's self-supervised weights."""

    name: Literal["resnet50"] = "resnet50"

    def create(self) -> "ResNet":
        return ResNet(50, weights=self.weights, pooling=self.pooling.build())


class ResNet101Config(TorchvisionConfig, frozen=True):
    """ResNet-101 (He et al. 2016), 2 048 features."""

    name: Literal["resnet101"] = "resnet101"

    def create(self) -> "ResNet":
        return ResNet(101, weights=self.weights, pooling=self.pooling.build())


class ResNet(Backbone):
    """torchvision's ResNet up to its pooling.

    Args:
        depth: 18, 50 or 101.
        weights: see `TorchvisionConfig`.
        pooling: pooling of the last feature map; None averages.

    Raises:
        UserError: the weights are unknown or cannot be downloaded or read.
    """

    def __init__(
        self, depth: Literal[18, 50, 101], *, weights: str | None = None, pooling: Pooling | None = None
    ) -> None:
        super().__init__()
        self.network, self.num_features = build_torchvision(f"resnet{depth}", weights, "fc")
        self.network.avgpool = pooling or Avg()

    def blocks(self) -> list[nn.Module]:
        return blocks_in(self.network, "layer1", "layer2", "layer3", "layer4")

    def forward(self, images: Tensor) -> Tensor:
        return self.network(images)
