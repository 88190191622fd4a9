"""Random resized crops and flips with ImageNet statistics: the literature's standard augmentation."""

from typing import Annotated, Literal

from pydantic import Field

from dmlkit.transforms.base import Channels, ImageTransform, PositiveChannels, TransformConfig


class ImageNetConfig(TransformConfig, frozen=True):
    """Random resized crop and flip to train, resize and centre crop to evaluate."""

    name: Literal["imagenet"] = "imagenet"
    size: Annotated[int, Field(ge=8)] = 224
    resize: Annotated[int, Field(ge=8)] = 256  # shorter side before the centre crop, pixels
    min_scale: Annotated[float, Field(gt=0, le=1)] = 0.08  # smallest share of the area that a random crop keeps
    flip: bool = True
    mean: Channels = (0.485, 0.456, 0.406)  # of pixels in 0..1
    std: PositiveChannels = (0.229, 0.224, 0.225)

    def training(self) -> ImageTransform:
        from torchvision.transforms import v2

        crop = v2.RandomResizedCrop(self.size, scale=(self.min_scale, 1.0), antialias=True)
        return v2.Compose([crop, v2.RandomHorizontalFlip()]) if self.flip else crop

    def evaluation(self) -> ImageTransform:
        from torchvision.transforms import v2

        return v2.Compose([v2.Resize(self.resize, antialias=True), v2.CenterCrop(self.size)])
