"""Interface of the transforms: uint8 images of any size to uint8 images of one size, and their normalization."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

from pydantic import Field, ValidationInfo, model_validator
from torch import Tensor

from dmlkit.component import ComponentConfig, one_of
from dmlkit.transforms.augmentations import AugmentationConfig, GaussianBlurConfig, ImageTransform
from dmlkit.transforms.cropping import Interpolation, resize

Channels = tuple[float, float, float]
PositiveChannels = tuple[Annotated[float, Field(gt=0)], Annotated[float, Field(gt=0)], Annotated[float, Field(gt=0)]]
Pixels = Annotated[int, Field(ge=8, le=16_384)]  # of the largest, one image takes 0.8 GB


class Resizing(NamedTuple):
    """Resizing of every image before the crop in evaluation."""

    side: int
    square: bool = False
    """Whether both sides get that length; otherwise the shorter side gets it, and the aspect ratio is kept."""
    interpolation: Interpolation = "bilinear"

    @property
    def text(self) -> str:
        """Description in words.

        Example:
            >>> Resizing(256).text
            'a shorter side of 256 pixels, bilinear'
        """
        shape = f"{self.side} x {self.side}" if self.square else f"a shorter side of {self.side}"
        return f"{shape} pixels, {self.interpolation}"

    def size_of(self, height: int, width: int) -> tuple[int, int]:
        """Return height and width of a resized image.

        Example:
            >>> Resizing(256).size_of(2, 60_000), Resizing(256, square=True).size_of(2, 60_000)
            ((256, 7680000), (256, 256))
        """
        if self.square:
            return self.side, self.side
        shorter = min(height, width)
        return self.side * height // shorter, self.side * width // shorter

    def __call__(self, image: Tensor) -> Tensor:
        """Resize an image: (3, H, W) uint8 -> (3, H', W') uint8; one of the right size is returned unchanged."""
        return resize(image, *self.size_of(*image.shape[-2:]), self.interpolation)


class TransformConfig(ComponentConfig, ABC, frozen=True):
    """Root of the transform family.

    Images stay uint8 RGB until they are on the device, where the model's first layer normalizes them. So an exported
    model takes pixels.
    """

    size: Pixels
    """Side of the square that the model sees, in pixels."""
    mean: Channels
    """Mean of each channel, in the order of ``channels``, of pixels in 0..``pixel_max``."""
    std: PositiveChannels
    """Standard deviation of each channel, in the order of ``channels``, of pixels in 0..``pixel_max``."""
    channels: Literal["rgb", "bgr"] = "rgb"
    """Order of the color channels in the model's input."""
    pixel_max: Literal[1, 255] = 1
    """Value of white before ``mean`` and ``std`` are applied."""
    augment: tuple[Annotated[AugmentationConfig, one_of], ...] = ()
    """Further random changes of training images, after the crop and before normalization, in this order."""

    @model_validator(mode="after")
    def check_mean(self, info: ValidationInfo) -> "TransformConfig":
        """Check that ``mean`` is a mean of pixels in 0..``pixel_max``; a run stays readable."""
        is_trained = (info.context or {}).get("is_trained", False)
        if not is_trained and not all(0 <= mean <= self.pixel_max for mean in self.mean):
            advice = "; divide mean and std by 255, or set pixel_max: 255" if self.pixel_max == 1 else ""
            text = f"got {list(self.mean)}, expected means of pixels in 0..{self.pixel_max}"
            raise ValueError(f"mean: {text}{advice}")
        return self

    @model_validator(mode="after")
    def check_sizes(self) -> "TransformConfig":
        """Check that the crop fits into the resized image, and a blur into the crop."""
        if self.resizing.side < self.size:
            raise ValueError(
                f"size {self.size} cannot be cropped from images resized to {self.resizing.side}; "
                f"use a resize of at least {self.size}"
            )
        for index, augmentation in enumerate(self.augment):
            if isinstance(augmentation, GaussianBlurConfig) and augmentation.kernel_size > self.training_side:
                text = f"got {augmentation.kernel_size}, expected at most the size {self.training_side} of an image"
                raise ValueError(f"augment.{index}.kernel_size: {text}")
        return self

    @property
    def training_side(self) -> int:
        """Side in pixels of the square that the model sees in training."""
        return self.size

    @property
    @abstractmethod
    def resizing(self) -> Resizing:
        """Resizing that is the first step of `evaluation`."""

    @abstractmethod
    def training(self) -> ImageTransform:
        """Return a function (3, H, W) uint8 -> (3, size, size) uint8 with random augmentation, except ``augment``.

        Its random numbers come from torch's global generator.
        """

    def evaluation(self) -> ImageTransform:
        """Return a function (3, H, W) uint8 -> (3, size, size) uint8 that resizes and takes the center crop."""
        return _Evaluation(self.resizing, self.size)

    @property
    def augments(self) -> bool:
        """Whether `training` or ``augment`` draws random numbers."""
        return True


@dataclass(frozen=True)
class _Evaluation:
    resizing: Resizing
    size: int

    def __call__(self, image: Tensor) -> Tensor:
        resized = self.resizing(image)
        top, left = (round((length - self.size) / 2) for length in resized.shape[-2:])
        return resized[:, top : top + self.size, left : left + self.size]
