"""The preprocessing that the backbone's weights were published with."""

from typing import Annotated, Literal

from pydantic import Field

from dmlkit.component import from_weights
from dmlkit.transforms.base import Channels, ImageTransform, Pixels, PositiveChannels, Resizing, TransformConfig
from dmlkit.transforms.cropping.crops import RandomResizedCrop
from dmlkit.transforms.cropping.windows import Interpolation


class PretrainedConfig(TransformConfig, frozen=True):
    """What the weights were published with, and crops and flips as ``imagenet`` to train.

    A recipe gives only the keys that are to be others: the reader takes the rest from ``backbone.weights``, and the
    recipe that a run keeps has them all. In Python they are those of timm's ResNet-50 unless given.

    Example:
        >>> PretrainedConfig(size=384, resize=384, square=True).resizing.text
        '384 x 384 pixels, bicubic'
    """

    name: Literal["pretrained"] = "pretrained"
    size: Annotated[Pixels, from_weights] = 224
    """Side of the square that the model sees, in pixels; left out, ``backbone.image_size`` or the published one."""
    resize: Annotated[Pixels, from_weights] = 256
    """Side before the centre crop, in pixels; left out, it grows with ``size``."""
    square: Annotated[bool, from_weights] = False
    """Squeeze both sides to ``resize``; otherwise the shorter one gets that length."""
    interpolation: Annotated[Interpolation, from_weights] = "bicubic"
    """Between pixels, bilinear or bicubic."""
    mean: Annotated[Channels, from_weights] = (0.485, 0.456, 0.406)
    """Mean of each channel, in the order of ``channels``, of pixels in 0..``pixel_max``."""
    std: Annotated[PositiveChannels, from_weights] = (0.229, 0.224, 0.225)
    """Standard deviation of each channel, likewise."""
    min_scale: Annotated[float, Field(gt=0, le=1)] = 0.08
    """Smallest share of the area that a random crop keeps."""
    flip: bool = True
    """Mirror a training image half of the time."""

    @property
    def resizing(self) -> Resizing:
        return Resizing(self.resize, self.square, self.interpolation)

    def training(self) -> ImageTransform:
        return RandomResizedCrop(self.size, self.min_scale, flip=self.flip, interpolation=self.interpolation)
