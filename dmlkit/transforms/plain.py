"""Plain resizing, without augmentation."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from dmlkit.transforms.base import Channels, ImageTransform, Pixels, PositiveChannels, Resizing, TransformConfig


class PlainConfig(TransformConfig, frozen=True):
    """Resize to a square, nothing else; for small images that carry their own variation."""

    name: Literal["plain"] = "plain"
    size: Pixels = 32
    """Side of the square that the model sees, in pixels."""
    mean: Channels = (0.5, 0.5, 0.5)
    """Mean of each channel, in the order of ``channels``, of pixels in 0..``pixel_max``."""
    std: PositiveChannels = (0.5, 0.5, 0.5)
    """Standard deviation of each channel, likewise."""

    @property
    def resizing(self) -> Resizing:
        return Resizing(self.size, square=True)

    def training(self) -> ImageTransform:
        return self.evaluation()

    def evaluation(self) -> ImageTransform:
        return _ToSquare(self.size, self.resizing.transform())

    @property
    def augments(self) -> bool:
        return False


@dataclass(frozen=True)
class _ToSquare:
    """A resizing that leaves images of the size alone: glyphs have it, and a look is 20 times faster."""

    size: int
    resize: ImageTransform

    def __call__(self, image: Tensor) -> Tensor:
        return image if image.shape[-2:] == (self.size, self.size) else self.resize(image)
