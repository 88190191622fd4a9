"""Small convolutional network for small images, which trains on a laptop."""

from pydantic import PositiveInt
from torch import Tensor, nn

from dmlkit.backbones.base import Backbone


class SmallCNN(Backbone, name="small_cnn"):
    """Six 3x3 convolutions with batch norm for images of about 32 pixels, trained from scratch.

    The first two pairs of convolutions are each followed by halving, the third by average pooling.

    Example:
        >>> import torch
        >>> SmallCNN()(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 128])
    """

    width: PositiveInt = 32
    """Channels of the first pair of layers; the second and third pairs have two and four times as many."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.num_features = 4 * self.width
        layers: list[nn.Module] = []
        channels = 3
        for width, pool in ((self.width, True), (2 * self.width, True), (4 * self.width, False)):
            for _ in range(2):
                convolution = nn.Conv2d(channels, width, kernel_size=3, padding=1, bias=False)
                layers += [convolution, nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
                channels = width
            if pool:
                layers.append(nn.MaxPool2d(2))
        self.layers = nn.Sequential(*layers)

    def blocks(self) -> list[nn.Module]:
        convolutions = [layer for layer in self.layers if isinstance(layer, nn.Conv2d)]
        norms = [layer for layer in self.layers if isinstance(layer, nn.BatchNorm2d)]
        return [nn.ModuleList(pair) for pair in zip(convolutions, norms, strict=True)]

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images).mean((2, 3))
