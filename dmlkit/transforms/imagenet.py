"""Transform with random resized crops, flips and ImageNet's statistics, the standard of the literature."""

from typing import Annotated, Literal

from pydantic import Field

from dmlkit.transforms.base import Channels, ImageTransform, Pixels, PositiveChannels, Resizing, TransformConfig
from dmlkit.transforms.cropping.crops import RandomResizedCrop


class ImageNetConfig(TransformConfig, frozen=True):
    """Random resized crop and flip in training, resize and center crop in evaluation; for torchvision's weights."""

    name: Literal["imagenet"] = "imagenet"
    size: Pixels = 224
    """Side of the square that the model sees, in pixels."""
    resize: Pixels = 256
    """Shorter side before the center crop, in pixels."""
    min_scale: Annotated[float, Field(gt=0, le=1)] = 0.08
    """Smallest share of the area that a random crop keeps."""
    flip: bool = True
    """Mirror each training image with probability 1/2."""
    mean: Channels = (0.485, 0.456, 0.406)
    """Mean of each channel, in the order of ``channels``, of pixels in 0..``pixel_max``."""
    std: PositiveChannels = (0.229, 0.224, 0.225)
    """Standard deviation of each channel, in the order of ``channels``, of pixels in 0..``pixel_max``."""

    @property
    def resizing(self) -> Resizing:
        return Resizing(self.resize)

    def training(self) -> ImageTransform:
        return RandomResizedCrop(self.size, self.min_scale, flip=self.flip)
