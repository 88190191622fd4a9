"""Plain resizing, without augmentation."""

from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor

from dmlkit.transforms.base import Channels, ImageTransform, PositiveChannels, TransformConfig


class PlainConfig(TransformConfig, frozen=True):
    """Resize to a square, nothing else; for small images that carry their own variation."""

    name: Literal["plain"] = "plain"
    size: Annotated[int, Field(ge=8)] = 32
    mean: Channels = (0.5, 0.5, 0.5)  # of pixels in 0..1
    std: PositiveChannels = (0.5, 0.5, 0.5)

    def training(self) -> ImageTransform:
        return self.evaluation()

    def evaluation(self) -> ImageTransform:
        from torchvision.transforms import v2

        resize = v2.Resize((self.size, self.size))

        def transform(image: Tensor) -> Tensor:
            return image if image.shape[-2:] == (self.size, self.size) else resize(image)

        return transform

    @property
    def augments(self) -> bool:
        return False
