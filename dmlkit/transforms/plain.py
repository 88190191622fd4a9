"""Transform that only resizes, without augmentation."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from dmlkit.transforms.base import Channels, ImageTransform, Pixels, PositiveChannels, Resizing, TransformConfig


class PlainConfig(TransformConfig, frozen=True):
    """Resize to a square without augmentation; for small images that vary enough themselves."""

    name: Literal["plain"] = "plain"
    size: Pixels = 32
    """Side of the square that the model sees, in pixels."""
    mean: Channels = (0.5, 0.5, 0.5)
    """Mean of each channel, in the order of ``channels``, of pixels in 0..``pixel_max``."""
    std: PositiveChannels = (0.5, 0.5, 0.5)
    """Standard deviation of each channel, in the order of ``channels``, of pixels in 0..``pixel_max``."""

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
    """Resizing that skips images of the right size, such as glyphs, where the check is 20 times faster."""

    size: int
    resize: ImageTransform

    def __call__(self, image: Tensor) -> Tensor:
        return image if image.shape[-2:] == (self.size, self.size) else self.resize(image)
