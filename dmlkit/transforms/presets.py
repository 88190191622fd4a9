"""Transforms of papers and of pretrained networks."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from dmlkit.component import from_weights
from dmlkit.transforms.augmentations import ImageTransform
from dmlkit.transforms.base import Channels, Pixels, PositiveChannels, Resizing, TransformConfig
from dmlkit.transforms.cropping import Interpolation, RandomResizedCrop, SquareCrop


class PlainConfig(TransformConfig, frozen=True):
    """Resize to a square, with no augmentation but ``augment``; for small images that vary enough themselves."""

    name: Literal["plain"] = "plain"
    size: Pixels = 32
    mean: Channels = (0.5, 0.5, 0.5)
    std: PositiveChannels = (0.5, 0.5, 0.5)

    @property
    def resizing(self) -> Resizing:
        return Resizing(self.size, square=True)

    def training(self) -> ImageTransform:
        return self.evaluation()

    def evaluation(self) -> ImageTransform:
        return self.resizing

    @property
    def augments(self) -> bool:
        return bool(self.augment)


class RandomCropConfig(TransformConfig, frozen=True, abstract=True):
    """Base of the transforms with random resized crops in training, and a resize and center crop in evaluation."""

    min_scale: Annotated[float, Field(gt=0, le=1)] = 0.08
    """Smallest share of the area that a random crop keeps."""
    flip: bool = True
    """Mirror each training image with probability 1/2."""
    training_size: Pixels | None = None
    """Side of the crops in training, if it is not ``size``. Smaller ones train faster, and show objects as large as
    whole images do in evaluation (Touvron et al. 2019)."""

    @property
    def training_side(self) -> int:
        return self.training_size or self.size

    def training(self) -> ImageTransform:
        interpolation = self.resizing.interpolation
        return RandomResizedCrop(self.training_side, self.min_scale, flip=self.flip, interpolation=interpolation)


class KeptAspectConfig(RandomCropConfig, frozen=True, abstract=True):
    """Base of those that keep the aspect ratio in evaluation."""

    interpolation: ClassVar[Interpolation] = "bilinear"
    size: Pixels = 224
    resize: Pixels = 256
    """Shorter side before the center crop, in pixels."""

    @property
    def resizing(self) -> Resizing:
        return Resizing(self.resize, interpolation=self.interpolation)


class ImageNetConfig(KeptAspectConfig, frozen=True):
    """Random resized crop and flip in training, resize and center crop in evaluation; for torchvision's weights."""

    name: Literal["imagenet"] = "imagenet"
    mean: Channels = (0.485, 0.456, 0.406)
    std: PositiveChannels = (0.229, 0.224, 0.225)


class PretrainedConfig(RandomCropConfig, frozen=True):
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
    std: Annotated[PositiveChannels, from_weights] = (0.229, 0.224, 0.225)

    @property
    def resizing(self) -> Resizing:
        return Resizing(self.resize, self.square, self.interpolation)


class HypViTConfig(KeptAspectConfig, frozen=True):
    """Bicubic crops of at least a fifth of the image, as in Hyp-ViT (Ermolov et al., CVPR 2022).

    Statistics are those of timm's ViT; DINO and DeiT weights need ImageNet's ``mean`` and ``std``. On CUB-200-2011
    the authors evaluate with ``resize: 256``.
    """

    interpolation: ClassVar[Interpolation] = "bicubic"
    name: Literal["hyp_vit"] = "hyp_vit"
    resize: Pixels = 224
    min_scale: Annotated[float, Field(gt=0, le=1)] = 0.2
    mean: Channels = (0.5, 0.5, 0.5)
    std: PositiveChannels = (0.5, 0.5, 0.5)


class BNInceptionConfig(KeptAspectConfig, frozen=True):
    """BGR pixels 0..255 minus (104, 117, 128), as BN-Inception's weights expect; crops and flips as in ``imagenet``.

    The defaults are the settings of the code of Proxy-Anchor, SoftTriple and ProxyGML; the Reality Check has size 227
    and min_scale 0.16.
    """

    name: Literal["bn_inception"] = "bn_inception"
    mean: Channels = (104.0, 117.0, 128.0)
    """Mean of blue, green and red, of pixels in 0..255."""
    std: PositiveChannels = (1.0, 1.0, 1.0)
    """Standard deviation of blue, green and red; 1 keeps the range of the Caffe model."""
    channels: Literal["bgr"] = "bgr"
    """Order of the color channels in the backbone's input."""
    pixel_max: Literal[255] = 255


class CgmlCarsConfig(TransformConfig, frozen=True):
    """Images squeezed to 256 x 256, then a random 227 x 227 crop and a flip (Chen et al., AAAI 2021, Table 2).

    Statistics are ImageNet's, for GoogLeNet; with BN-Inception set its ``channels``, ``pixel_max``, ``mean`` and
    ``std``. Evaluation uses the center crop.
    """

    name: Literal["cgml_cars"] = "cgml_cars"
    size: Pixels = 227
    resize: Pixels = 256
    """Length of both sides before the crop, in pixels; the aspect ratio is not kept."""
    flip: bool = True
    """Mirror each training image with probability 1/2."""
    mean: Channels = (0.485, 0.456, 0.406)
    std: PositiveChannels = (0.229, 0.224, 0.225)

    @property
    def resizing(self) -> Resizing:
        return Resizing(self.resize, square=True)

    def training(self) -> ImageTransform:
        return SquareCrop(self.size, self.resize, flip=self.flip)
