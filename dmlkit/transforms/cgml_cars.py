"""The augmentation of CGML's Cars196 results."""

from typing import Literal

from dmlkit.transforms.base import Channels, ImageTransform, Pixels, PositiveChannels, Resizing, TransformConfig
from dmlkit.transforms.cropping.crops import SquareCrop


class CgmlCarsConfig(TransformConfig, frozen=True):
    """Images squeezed to 256 x 256, then a random 227 x 227 crop and a flip (Chen et al., AAAI 2021, Table 2).

    Statistics are ImageNet's, for GoogLeNet; with BN-Inception give its ``channels``, ``pixel_max``, ``mean`` and
    ``std``. Evaluation takes the centre crop.
    """

    name: Literal["cgml_cars"] = "cgml_cars"
    size: Pixels = 227
    """Side of the square that the model sees, in pixels."""
    resize: Pixels = 256
    """Both sides before the crop, in pixels, whatever the shape."""
    flip: bool = True
    """Mirror a training image half of the time."""
    mean: Channels = (0.485, 0.456, 0.406)
    """Mean of each channel, in the order of ``channels``, of pixels in 0..``pixel_max``."""
    std: PositiveChannels = (0.229, 0.224, 0.225)
    """Standard deviation of each channel, likewise."""

    @property
    def resizing(self) -> Resizing:
        return Resizing(self.resize, square=True)

    def training(self) -> ImageTransform:
        return SquareCrop(self.size, self.resize, flip=self.flip)
