"""The input of the published BN-Inception weights: BGR in 0..255, less the mean."""

from typing import Annotated, Literal

from pydantic import Field

from dmlkit.transforms.base import Channels, ImageTransform, PositiveChannels, Resizing, Side, TransformConfig
from dmlkit.transforms.cropping.crops import RandomResizedCrop


class BNInceptionConfig(TransformConfig, frozen=True):
    """BGR pixels 0..255 less (104, 117, 128), crops and flips as ``imagenet``: what BN-Inception's weights expect.

    The settings of the code of Proxy-Anchor, SoftTriple and ProxyGML; the Reality Check has size 227 and
    min_scale 0.16.
    """

    name: Literal["bn_inception"] = "bn_inception"
    size: Side = 224
    resize: Side = 256  # shorter side before the centre crop
    min_scale: Annotated[float, Field(gt=0, le=1)] = 0.08  # smallest share of the area that a random crop keeps
    flip: bool = True
    mean: Channels = (104.0, 117.0, 128.0)  # blue, green, red
    std: PositiveChannels = (1.0, 1.0, 1.0)
    channels: Literal["bgr"] = "bgr"
    pixel_max: Literal[255] = 255

    @property
    def resizing(self) -> Resizing:
        return Resizing(self.resize)

    def training(self) -> ImageTransform:
        return RandomResizedCrop(self.size, self.min_scale, flip=self.flip)
