"""Augmentations of training images, by their names and keys in torchvision.transforms.v2; see ``transform.augment``."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from inspect import signature
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, Discriminator, Field, NonNegativeInt, PositiveInt, Tag, model_validator
from torch import Tensor

from dmlkit.component import ComponentConfig, import_on_demand

__all__ = [
    "AugmentationConfig",
    "AutoAugmentConfig",
    "ColorJitterConfig",
    "FromTorchvisionConfig",
    "GaussianBlurConfig",
    "RandAugmentConfig",
    "RandomAffineConfig",
    "RandomErasingConfig",
    "RandomGrayscaleConfig",
    "RandomHorizontalFlipConfig",
    "RandomPerspectiveConfig",
    "RandomRotationConfig",
    "RandomSolarizeConfig",
    "RandomVerticalFlipConfig",
    "TrivialAugmentConfig",
]

ImageTransform = Callable[[Tensor], Tensor]
Number = TypeVar("Number")
Bound = TypeVar("Bound")


def _ascending(bounds: tuple[float, float]) -> tuple[float, float]:
    if bounds[0] > bounds[1]:
        raise ValueError(f"got {list(bounds)}, expected the lower number first")
    return bounds


def _odd(size: int) -> int:
    if size % 2 == 0:
        raise ValueError(f"got {size}, expected an odd number")
    return size


def _kind(value: Any) -> str:
    return "<several>" if isinstance(value, list | tuple) else "<one>"


Range = Annotated[tuple[Bound, Bound], AfterValidator(_ascending)]
NumberOrRange = Annotated[
    Annotated[Number, Tag("<one>")] | Annotated[Range[Bound], Tag("<several>")], Discriminator(_kind)
]
Share = Annotated[float, Field(ge=0, le=1)]
Factor = Annotated[float, Field(ge=0, le=255)]  # beyond it all pixels but black are white
Angle = Annotated[float, Field(ge=-360, le=360)]
Slant = Annotated[float, Field(gt=-90, lt=90)]
Ratio = Annotated[float, Field(ge=0.01, le=100)]
Deviation = Annotated[float, Field(ge=0.01, le=1000)]
Strengths = Annotated[int, Field(ge=2, le=256)]  # more are no other pixels; of 1 torchvision makes no integer
Level = Annotated[float, Field(ge=0, le=255)]
Fill = Annotated[
    Annotated[Level, Tag("<one>")] | Annotated[tuple[Level, Level, Level], Tag("<several>")], Discriminator(_kind)
]
Filling = Literal["nearest", "bilinear"]


class AugmentationConfig(ComponentConfig, ABC, frozen=True):
    """Root of the augmentation family: random changes of a training image after its crop.

    Example:
        >>> import torch
        >>> image = torch.full((3, 32, 32), 255, dtype=torch.uint8)
        >>> erase = RandomErasingConfig(p=1.0, scale=(0.25, 0.25), ratio=(1.0, 1.0)).build()
        >>> int((erase(image) == 0).sum())
        768
    """

    p: Share = 1.0
    """Probability that an image is changed."""

    @abstractmethod
    def build(self) -> ImageTransform:
        """Return a function (3, S, S) uint8 -> (3, S, S) uint8, which does not change its input.

        Its random numbers come from torch's global generator on the CPU, which is seeded for each image.
        """


class FromTorchvisionConfig(AugmentationConfig, frozen=True, abstract=True):
    """Base of the augmentations that torchvision computes.

    Where torchvision's class has no ``p`` of its own, `torchvision.transforms.v2.RandomApply` applies it.
    """

    transform: ClassVar[str]
    """Name in ``torchvision.transforms.v2``. Default: that of the class without ``Config``."""

    @classmethod
    def __pydantic_init_subclass__(cls, abstract: bool = False, **kwargs: Any) -> None:
        if not hasattr(cls, "transform"):
            cls.transform = cls.__name__.removesuffix("Config")
        super().__pydantic_init_subclass__(abstract, **kwargs)

    def build(self) -> ImageTransform:
        from torchvision.transforms import InterpolationMode, v2

        kind = getattr(v2, self.transform)
        options = self.options("p")
        if "interpolation" in options:
            options["interpolation"] = InterpolationMode(options["interpolation"])
        if "p" in signature(kind).parameters:
            return kind(**options, p=self.p)
        return kind(**options) if self.p == 1 else v2.RandomApply([kind(**options)], self.p)


class AutoAugmentConfig(FromTorchvisionConfig, frozen=True):
    """A random one of 25 pairs of operations that were found for a dataset (Cubuk et al. 2019)."""

    name: Literal["auto_augment"] = "auto_augment"
    policy: Literal["imagenet", "cifar10", "svhn"] = "imagenet"
    """Dataset for which the pairs were found."""
    interpolation: Filling = "nearest"
    """Interpolation between pixels."""
    fill: Fill | None = None
    """Value 0..255, or one per channel, of pixels from outside the image; null is black."""

    def options(self, *others: str) -> dict[str, Any]:
        from torchvision.transforms import AutoAugmentPolicy

        return {**super().options(*others), "policy": AutoAugmentPolicy(self.policy)}


class ColorJitterConfig(FromTorchvisionConfig, frozen=True):
    """Random brightness, contrast, saturation and hue, in random order."""

    name: Literal["color_jitter"] = "color_jitter"
    brightness: NumberOrRange[Factor, Factor] = 0.0
    """b draws the factor from 1 - b (at least 0) to 1 + b; a range draws it from there."""
    contrast: NumberOrRange[Factor, Factor] = 0.0
    """Range of the factor, as for brightness."""
    saturation: NumberOrRange[Factor, Factor] = 0.0
    """Range of the factor, as for brightness."""
    hue: NumberOrRange[Annotated[float, Field(ge=0, le=0.5)], Annotated[float, Field(ge=-0.5, le=0.5)]] = 0.0
    """h draws the shift from -h to h; 0.5 is half of the color circle; a range draws it from there."""

    @model_validator(mode="after")
    def check_effect(self) -> "ColorJitterConfig":
        """Check that a range is given; 0 may be one value of a study, and a run has all keys."""
        if not self.model_fields_set & self.options("p").keys():
            raise ValueError("color_jitter changes nothing; set brightness, contrast, saturation or hue")
        return self


class GaussianBlurConfig(FromTorchvisionConfig, frozen=True):
    """Blur with a Gaussian of random width."""

    name: Literal["gaussian_blur"] = "gaussian_blur"
    kernel_size: Annotated[PositiveInt, AfterValidator(_odd)]
    """Side of the kernel in pixels, an odd number up to ``size``; SimCLR uses a tenth of the image."""
    sigma: NumberOrRange[Deviation, Deviation] = (0.1, 2.0)
    """Standard deviation in pixels, or the range from which it is drawn."""


class RandAugmentConfig(FromTorchvisionConfig, frozen=True):
    """Several random operations of one strength (Cubuk et al. 2020)."""

    name: Literal["rand_augment"] = "rand_augment"
    num_ops: Annotated[int, Field(ge=1, le=14)] = 2
    """Number of operations, at most the 14 that there are."""
    magnitude: NonNegativeInt = 9
    """Strength of all operations, below ``num_magnitude_bins``."""
    num_magnitude_bins: Strengths = 31
    """Number of strengths."""
    interpolation: Filling = "nearest"
    """Interpolation between pixels."""
    fill: Fill | None = None
    """Value 0..255, or one per channel, of pixels from outside the image; null is black."""

    @model_validator(mode="after")
    def check_magnitude(self) -> "RandAugmentConfig":
        """Check that the strength exists."""
        if self.magnitude >= self.num_magnitude_bins:
            raise ValueError(f"magnitude: got {self.magnitude}, expected less than {self.num_magnitude_bins}")
        return self


class RandomAffineConfig(FromTorchvisionConfig, frozen=True):
    """Random rotation, shift, scaling and shear around the center."""

    name: Literal["random_affine"] = "random_affine"
    degrees: NumberOrRange[Annotated[float, Field(ge=0, le=180)], Angle]
    """d draws the angle from -d to d degrees; a range draws it from there."""
    translate: tuple[Share, Share] | None = None
    """Maximum shift, horizontal and vertical, as shares of the side; null does not shift."""
    scale: Range[Ratio] | None = None
    """Range of the factor by which sides grow; null keeps the size."""
    shear: NumberOrRange[Annotated[float, Field(ge=0, lt=90)], Slant] | None = None
    """Degrees of the horizontal shear, as for degrees; null does not shear."""
    interpolation: Filling = "nearest"
    """Interpolation between pixels."""
    fill: Fill = 0.0
    """Value 0..255, or one per channel, of pixels from outside the image."""


class RandomErasingConfig(FromTorchvisionConfig, frozen=True):
    """A random box of the image gets one color (Zhong et al. 2020)."""

    name: Literal["random_erasing"] = "random_erasing"
    p: Share = 0.5
    scale: Range[Share] = (0.02, 0.33)
    """Range of the box's share of the area."""
    ratio: Range[Ratio] = (0.3, 3.3)
    """Range of the box's height divided by its width."""
    value: Fill = 0.0
    """Value 0..255, or one per channel, of the erased pixels, before normalization."""


class RandomGrayscaleConfig(FromTorchvisionConfig, frozen=True):
    """The image without its colors."""

    name: Literal["random_grayscale"] = "random_grayscale"
    p: Share = 0.1


class RandomHorizontalFlipConfig(FromTorchvisionConfig, frozen=True):
    """Left and right swapped, for transforms without ``flip``."""

    name: Literal["random_horizontal_flip"] = "random_horizontal_flip"
    p: Share = 0.5


class RandomPerspectiveConfig(FromTorchvisionConfig, frozen=True):
    """The image seen from a random side."""

    name: Literal["random_perspective"] = "random_perspective"
    p: Share = 0.5
    distortion_scale: Share = 0.5
    """Maximum shift of the corners, as a share of half the side."""
    interpolation: Filling = "bilinear"
    """Interpolation between pixels."""
    fill: Fill = 0.0
    """Value 0..255, or one per channel, of pixels from outside the image."""


class RandomRotationConfig(FromTorchvisionConfig, frozen=True):
    """Random rotation around the center."""

    name: Literal["random_rotation"] = "random_rotation"
    degrees: NumberOrRange[Annotated[float, Field(ge=0, le=180)], Angle]
    """d draws the angle from -d to d degrees; a range draws it from there."""
    interpolation: Filling = "nearest"
    """Interpolation between pixels."""
    fill: Fill = 0.0
    """Value 0..255, or one per channel, of pixels from outside the image."""


class RandomSolarizeConfig(FromTorchvisionConfig, frozen=True):
    """Bright pixels inverted, as in BYOL."""

    name: Literal["random_solarize"] = "random_solarize"
    p: Share = 0.5
    threshold: Level
    """Value from which on pixels are inverted, 0..255."""


class RandomVerticalFlipConfig(FromTorchvisionConfig, frozen=True):
    """Top and bottom swapped."""

    name: Literal["random_vertical_flip"] = "random_vertical_flip"
    p: Share = 0.5


class TrivialAugmentConfig(FromTorchvisionConfig, frozen=True):
    """One random operation of random strength (Müller and Hutter 2021); it has nothing to tune."""

    transform: ClassVar[str] = "TrivialAugmentWide"
    name: Literal["trivial_augment"] = "trivial_augment"
    num_magnitude_bins: Strengths = 31
    """Number of strengths."""
    interpolation: Filling = "nearest"
    """Interpolation between pixels."""
    fill: Fill | None = None
    """Value 0..255, or one per channel, of pixels from outside the image; null is black."""


import_on_demand(__name__)
