"""Transform with the preprocessing published with the backbone's weights."""

from typing import Annotated, Literal

from pydantic import Field

from dmlkit.component import from_weights
from dmlkit.transforms.base import Channels, ImageTransform, Pixels, PositiveChannels, Resizing, TransformConfig
from dmlkit.transforms.cropping.crops import RandomResizedCrop
from dmlkit.transforms.cropping.windows import Interpolation


class PretrainedConfig(TransformConfig, frozen=True):
    """Preprocessing published with the backbone's weights; in training, crops and flips as in ``imagenet``.

    A recipe needs only the keys that differ: the others are read from ``backbone.weights``, and the recipe in a run
    folder has all of them. In Python, the defaults are those of timm's ResNet-50.

    Example:
        >>> PretrainedConfig(size=384, resize=384, square=True).resizing.text
        '384 x 384 pixels, bicubic'
    """

    name: Literal["pretrained"] = "pretrained"
    size: Annotated[Pixels, from_weights] = 224
    """Side of the square that the model sees, in pixels; if not set, ``backbone.image_size`` or the published size."""
    resize: Annotated[Pixels, from_weights] = 256
    """Side before the center crop, in pixels; if not set, it is in proportion to ``size``."""
    square: Annotated[bool, from_weights] = False
    """Resize both sides to ``resize``; otherwise only the shorter one, and keep the aspect ratio."""
    interpolation: Annotated[Interpolation, from_weights] = "bicubic"
    """Interpolation between pixels, bilinear or bicubic."""
    mean: Annotated[Channels, from_weights] = (0.485, 0.456, 0.406)
    """Mean of each channel, in the order of ``channels``, of pixels in 0..``pixel_max``."""
    std: Annotated[PositiveChannels, from_weights] = (0.229, 0.224, 0.225)
    """Standard deviation of each channel, in the order of ``channels``, of pixels in 0..``pixel_max``."""
    min_scale: Annotated[float, Field(gt=0, le=1)] = 0.08
    """Smallest share of the area that a random crop keeps."""
    flip: bool = True
    """Mirror each training image with probability 1/2."""

    @property
    def resizing(self) -> Resizing:
        return Resizing(self.resize, self.square, self.interpolation)

    def training(self) -> ImageTransform:
        return RandomResizedCrop(self.size, self.min_scale, flip=self.flip, interpolation=self.interpolation)
