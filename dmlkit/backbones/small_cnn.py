"""Small convolutional network for small images, which trains on a laptop."""

from typing import Literal

from pydantic import PositiveInt
from torch import Tensor, nn

from dmlkit.backbones.base import Backbone, BackboneConfig


class SmallCNNConfig(BackboneConfig, frozen=True):
    """Six 3x3 convolutions with batch norm for images of about 32 pixels, trained from scratch."""

    name: Literal["small_cnn"] = "small_cnn"
    width: PositiveInt = 32
    """Channels of the first pair of layers; the second and third pairs have two and four times as many."""

    def create(self) -> "SmallCNN":
        return SmallCNN(width=self.width)


class SmallCNN(Backbone):
    """Three pairs of 3x3 convolutions, the first two each followed by halving, then average pooling.

    Example:
        >>> import torch
        >>> SmallCNN()(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 128])
    """

    def __init__(self, *, width: int = 32) -> None:
        super().__init__()
        self.num_features = 4 * width
        layers: list[nn.Module] = []
        channels = 3
        for wide, pool in ((width, True), (2 * width, True), (4 * width, False)):
            for _ in range(2):
                convolution = nn.Conv2d(channels, wide, kernel_size=3, padding=1, bias=False)
                layers += [convolution, nn.BatchNorm2d(wide), nn.ReLU(inplace=True)]
                channels = wide
            if pool:
                layers.append(nn.MaxPool2d(2))
        self.layers = nn.Sequential(*layers)

    def blocks(self) -> list[nn.Module]:
        convolutions = [layer for layer in self.layers if isinstance(layer, nn.Conv2d)]
        norms = [layer for layer in self.layers if isinstance(layer, nn.BatchNorm2d)]
        return [nn.ModuleList(pair) for pair in zip(convolutions, norms, strict=True)]

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images).mean((2, 3))
