"""The augmentation of Hyp-ViT and of OML's vision transformers."""

from typing import Annotated, Literal

from pydantic import Field

from dmlkit.transforms.base import Channels, ImageTransform, PositiveChannels, Resizing, Side, TransformConfig
from dmlkit.transforms.cropping.crops import RandomResizedCrop


class HypViTConfig(TransformConfig, frozen=True):
    """Bicubic crops of at least a fifth of the image, as in Hyp-ViT (Ermolov et al., CVPR 2022).

    Statistics are those of timm's ViT; DINO and DeiT weights take ImageNet's ``mean`` and ``std``. On CUB-200-2011
    the authors evaluate with ``resize: 256``.
    """

    name: Literal["hyp_vit"] = "hyp_vit"
    size: Side = 224
    resize: Side = 224  # shorter side before the centre crop
    min_scale: Annotated[float, Field(gt=0, le=1)] = 0.2  # smallest share of the area that a random crop keeps
    flip: bool = True
    mean: Channels = (0.5, 0.5, 0.5)
    std: PositiveChannels = (0.5, 0.5, 0.5)

    @property
    def resizing(self) -> Resizing:
        return Resizing(self.resize, interpolation="bicubic")

    def training(self) -> ImageTransform:
        return RandomResizedCrop(self.size, self.min_scale, flip=self.flip, interpolation="bicubic")
