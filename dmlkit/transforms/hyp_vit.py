"""Transform of Hyp-ViT and of OML's vision transformers."""

from typing import Annotated, Literal

from pydantic import Field

from dmlkit.transforms.base import Channels, ImageTransform, Pixels, PositiveChannels, Resizing, TransformConfig
from dmlkit.transforms.cropping.crops import RandomResizedCrop


class HypViTConfig(TransformConfig, frozen=True):
    """Bicubic crops of at least a fifth of the image, as in Hyp-ViT (Ermolov et al., CVPR 2022).

    Statistics are those of timm's ViT; DINO and DeiT weights need ImageNet's ``mean`` and ``std``. On CUB-200-2011
    the authors evaluate with ``resize: 256``.
    """

    name: Literal["hyp_vit"] = "hyp_vit"
    size: Pixels = 224
    """Side of the square that the model sees, in pixels."""
    resize: Pixels = 224
    """Shorter side before the center crop, in pixels."""
    min_scale: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Smallest share of the area that a random crop keeps."""
    flip: bool = True
    """Mirror each training image with probability 1/2."""
    mean: Channels = (0.5, 0.5, 0.5)
    """Mean of each channel, in the order of ``channels``, of pixels in 0..``pixel_max``."""
    std: PositiveChannels = (0.5, 0.5, 0.5)
    """Standard deviation of each channel, in the order of ``channels``, of pixels in 0..``pixel_max``."""

    @property
    def resizing(self) -> Resizing:
        return Resizing(self.resize, interpolation="bicubic")

    def training(self) -> ImageTransform:
        return RandomResizedCrop(self.size, self.min_scale, flip=self.flip, interpolation="bicubic")
