"""Plain resizing, without augmentation."""

from typing import Literal

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
        resize = self.resizing.transform()
        square = (self.size, self.size)
        # glyphs have the size already: the check is 20 times faster than torchvision's
        return lambda image: image if image.shape[-2:] == square else resize(image)

    @property
    def augments(self) -> bool:
        return False
