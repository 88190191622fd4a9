"""Transform of CGML's Cars196 results."""

from typing import Literal

from dmlkit.transforms.base import Channels, ImageTransform, Pixels, PositiveChannels, Resizing, TransformConfig
from dmlkit.transforms.cropping.crops import SquareCrop


class CgmlCarsConfig(TransformConfig, frozen=True):
    """Images squeezed to 256 x 256, then a random 227 x 227 crop and a flip (Chen et al., AAAI 2021, Table 2).

    Statistics are ImageNet's, for GoogLeNet; with BN-Inception set its ``channels``, ``pixel_max``, ``mean`` and
    ``std``. Evaluation uses the center crop.
    """

    name: Literal["cgml_cars"] = "cgml_cars"
    size: Pixels = 227
    """Side of the square that the model sees, in pixels."""
    resize: Pixels = 256
    """Length of both sides before the crop, in pixels; the aspect ratio is not kept."""
    flip: bool = True
    """Mirror each training image with probability 1/2."""
    mean: Channels = (0.485, 0.456, 0.406)
    """Mean of each channel, in the order of ``channels``, of pixels in 0..``pixel_max``."""
    std: PositiveChannels = (0.229, 0.224, 0.225)
    """Standard deviation of each channel, in the order of ``channels``, of pixels in 0..``pixel_max``."""

    @property
    def resizing(self) -> Resizing:
        return Resizing(self.resize, square=True)

    def training(self) -> ImageTransform:
        return SquareCrop(self.size, self.resize, flip=self.flip)
