"""The transform interface: uint8 images of any size in, uint8 images of one size out, and how to normalize them."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Annotated, Literal, NamedTuple

from pydantic import Field, model_validator
from torch import Tensor

from dmlkit.component import ComponentConfig
from dmlkit.transforms.cropping.windows import Interpolation

Channels = tuple[float, float, float]
PositiveChannels = tuple[Annotated[float, Field(gt=0)], Annotated[float, Field(gt=0)], Annotated[float, Field(gt=0)]]
Pixels = Annotated[int, Field(ge=8)]  # pixels
ImageTransform = Callable[[Tensor], Tensor]


class Resizing(NamedTuple):
    """How a transform's evaluation makes every image smaller before it crops: also what a cache keeps.

    Args:
        side: of the result, pixels.
        square: both sides get that length; otherwise the shorter one, and the shape is kept.
        interpolation: between pixels.
    """

    side: int
    square: bool = False
    interpolation: Interpolation = "bilinear"

    @property
    def text(self) -> str:
        """In words.

        >>> Resizing(256).text
        'a shorter side of 256 pixels, bilinear'
        """
        shape = f"{self.side} x {self.side}" if self.square else f"a shorter side of {self.side}"
        return f"{shape} pixels, {self.interpolation}"

    def size_of(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of what becomes of an image.

        >>> Resizing(256).size_of(2, 60_000), Resizing(256, square=True).size_of(2, 60_000)
        ((256, 7680000), (256, 256))
        """
        if self.square:
            return self.side, self.side
        shorter = min(height, width)
        return self.side * height // shorter, self.side * width // shorter

    def transform(self) -> ImageTransform:
        """(3, H, W) uint8 -> (3, H', W') uint8; an image that has the size already is returned as it is."""
        from torchvision.transforms import v2

        size = (self.side, self.side) if self.square else self.side
        return v2.Resize(size, v2.InterpolationMode(self.interpolation), antialias=True)


class TransformConfig(ComponentConfig, ABC, frozen=True):
    """Root of the transform family.

    Images stay uint8 RGB until they are on the device; the model's first layer normalizes them there, so an
    exported model takes plain pixels.
    """

    size: Pixels
    """Side of the square that the model sees, in pixels."""
    mean: Channels
    """Mean of each channel, in the order of ``channels``, of pixels in 0..``pixel_max``."""
    std: PositiveChannels
    """Standard deviation of each channel, likewise."""
    channels: Literal["rgb", "bgr"] = "rgb"
    """The order in which the model takes the colours."""
    pixel_max: Literal[1, 255] = 1
    """The value of white before ``mean`` and ``std`` apply."""

    @model_validator(mode="after")
    def check_sizes(self) -> "TransformConfig":
        """Hold the crop against the image that it is cut out of."""
        if self.resizing.side < self.size:
            raise ValueError(
                f"size {self.size} cannot be cut out of images resized to {self.resizing.side}; "
                f"make resize at least {self.size}"
            )
        return self

    @property
    @abstractmethod
    def resizing(self) -> Resizing:
        """The first step of `evaluation`."""

    @abstractmethod
    def training(self) -> ImageTransform:
        """(3, H, W) uint8 -> (3, size, size) uint8, with augmentation drawn from torch's global generator."""

    def evaluation(self) -> ImageTransform:
        """(3, H, W) uint8 -> (3, size, size) uint8, without chance: resized, then the centre cut out."""
        from torchvision.transforms import v2

        return v2.Compose([self.resizing.transform(), v2.CenterCrop(self.size)])

    @property
    def augments(self) -> bool:
        """Whether `training` draws random numbers."""
        return True
