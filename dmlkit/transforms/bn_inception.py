"""Transform for the published BN-Inception weights: BGR pixels in 0..255 minus the mean."""

from typing import Annotated, Literal

from pydantic import Field

from dmlkit.transforms.base import Channels, ImageTransform, Pixels, PositiveChannels, Resizing, TransformConfig
from dmlkit.transforms.cropping.crops import RandomResizedCrop


class BNInceptionConfig(TransformConfig, frozen=True):
    """BGR pixels 0..255 minus (104, 117, 128), as BN-Inception's weights expect; crops and flips as in ``imagenet``.

    The defaults are the settings of the code of Proxy-Anchor, SoftTriple and ProxyGML; the Reality Check has size 227
    and min_scale 0.16.
    """

    name: Literal["bn_inception"] = "bn_inception"
    size: Pixels = 224
    """Side of the square that the model sees, in pixels."""
    resize: Pixels = 256
    """Shorter side before the center crop, in pixels."""
    min_scale: Annotated[float, Field(gt=0, le=1)] = 0.08
    """Smallest share of the area that a random crop keeps."""
    flip: bool = True
    """Mirror each training image with probability 1/2."""
    mean: Channels = (104.0, 117.0, 128.0)
    """Mean of blue, green and red, of pixels in 0..255."""
    std: PositiveChannels = (1.0, 1.0, 1.0)
    """Standard deviation of blue, green and red; 1 keeps the range of the Caffe model."""
    channels: Literal["bgr"] = "bgr"
    """Order of the color channels in the backbone's input."""
    pixel_max: Literal[255] = 255
    """Value of white before ``mean`` and ``std`` are applied."""

    @property
    def resizing(self) -> Resizing:
        return Resizing(self.resize)

    def training(self) -> ImageTransform:
        return RandomResizedCrop(self.size, self.min_scale, flip=self.flip)
