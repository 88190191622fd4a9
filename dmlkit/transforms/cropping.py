"""Random crops of training images."""

from typing import Literal

import torch
from torch import Tensor

Interpolation = Literal["bilinear", "bicubic"]


class RandomResizedCrop:
    """Crop of at least ``min_scale`` of the area, 3:4 to 4:3, resized to a square and mirrored with probability 1/2.

    Args:
        size: side of the square, in pixels.
        min_scale: smallest share of the area, in 0..1.
        flip: whether half of the crops are mirrored.
        interpolation: interpolation between pixels.
    """

    def __init__(self, size: int, min_scale: float, *, flip: bool, interpolation: Interpolation = "bilinear") -> None:
        from torchvision.transforms import v2

        self.size, self.flip = size, flip
        self.interpolation: Interpolation = interpolation
        self.crop = v2.RandomResizedCrop(size, (min_scale, 1.0))

    def __call__(self, image: Tensor) -> Tensor:
        """Crop an image: (3, H, W) uint8 -> (3, size, size) uint8."""
        box = self.crop.make_params([image])
        top, left = box["top"], box["left"]
        part = image[:, top : top + box["height"], left : left + box["width"]]
        return _perhaps_mirrored(_squeezed(part, self.size, self.interpolation), flip=self.flip)


class SquareCrop:
    """Image squeezed to a square of ``resized`` pixels and cropped to a random square of ``size`` pixels."""

    def __init__(self, size: int, resized: int, *, flip: bool) -> None:
        self.size, self.resized, self.flip = size, resized, flip

    def __call__(self, image: Tensor) -> Tensor:
        """Crop an image: (3, H, W) uint8 -> (3, size, size) uint8."""
        top, left = torch.randint(0, self.resized - self.size + 1, (2,)).tolist()
        square = _squeezed(image, self.resized, "bilinear")[:, top : top + self.size, left : left + self.size]
        return _perhaps_mirrored(square, flip=self.flip)


def _squeezed(image: Tensor, side: int, interpolation: Interpolation) -> Tensor:
    """Resize an image to a square."""
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms.v2 import functional

    # with the colors of a pixel adjacent in memory, as a decoder leaves them, resizing takes half the time
    pixels = image.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    return functional.resize(pixels, [side, side], InterpolationMode(interpolation), antialias=True)


def _perhaps_mirrored(square: Tensor, *, flip: bool) -> Tensor:
    return square.flip(2) if flip and bool(torch.rand(1) < 0.5) else square
