"""Random resized crops: the augmentation of most of the literature, with different numbers."""

from typing import Literal

from dmlkit.transforms.base import ImageTransform


def random_resized_crop(
    size: int, min_scale: float, *, flip: bool, interpolation: Literal["bilinear", "bicubic"] = "bilinear"
) -> ImageTransform:
    """A crop of at least ``min_scale`` of the area, 3:4 to 4:3, resized to a square, and mirrored half of the time.

    Args:
        size: of the square, pixels.
        min_scale: share of the area, in 0..1.
        flip: mirror at all.
        interpolation: between pixels.
    """
    from torchvision.transforms import v2

    crop = v2.RandomResizedCrop(size, (min_scale, 1.0), interpolation=v2.InterpolationMode(interpolation))
    return v2.Compose([crop, v2.RandomHorizontalFlip()]) if flip else crop
