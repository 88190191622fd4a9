"""The transform interface: uint8 images of any size in, uint8 images of one size out, and how to normalize them."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Annotated

from pydantic import Field
from torch import Tensor

from dmlkit.component import ComponentConfig

Channels = tuple[float, float, float]
PositiveChannels = tuple[Annotated[float, Field(gt=0)], Annotated[float, Field(gt=0)], Annotated[float, Field(gt=0)]]
ImageTransform = Callable[[Tensor], Tensor]


class TransformConfig(ComponentConfig, ABC, frozen=True):
    """Root of the transform family.

    Images stay uint8 RGB until they are on the device; the model's first layer normalizes them there, so an
    exported model takes plain pixels.
    """

    size: Annotated[int, Field(ge=8)]  # side of the square that the model sees, pixels
    mean: Channels
    std: PositiveChannels

    @abstractmethod
    def training(self) -> ImageTransform:
        """(3, H, W) uint8 -> (3, size, size) uint8, with augmentation drawn from torch's global generator."""

    @abstractmethod
    def evaluation(self) -> ImageTransform:
        """(3, H, W) uint8 -> (3, size, size) uint8, without chance."""

    @property
    def augments(self) -> bool:
        """Whether `training` draws random numbers."""
        return True
