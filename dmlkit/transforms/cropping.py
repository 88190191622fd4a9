"""Resizing of images, and random crops of training images."""

from math import sqrt
from platform import machine
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import interpolate

Interpolation = Literal["bilinear", "bicubic"]
RATIOS = 3 / 4, 4 / 3  # of width to height
LOG_RATIOS = torch.tensor(RATIOS).log().tolist()


def resize(image: Tensor, height: int, width: int, interpolation: Interpolation) -> Tensor:
    """Resize an image (3, H, W) uint8 with antialiasing: equal to the bit to torchvision.transforms.v2.

    Importing torchvision's takes 2 s, of which a query of one image needs nothing else.
    """
    if image.shape[-2:] == (height, width):
        return image
    batch = image[None]
    if image.permute(1, 2, 0).is_contiguous():  # said by the strides, the result keeps the layout, without a copy
        batch = batch.as_strided(batch.shape, (image.numel(), *image.stride()))
    # the kernel for uint8 is only vectorized, and for bilinear only then used by torchvision, on these processors
    is_fast = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512") or machine() in ("aarch64", "arm64")
    if interpolation == "bicubic" or is_fast:
        return interpolate(batch, (height, width), mode=interpolation, antialias=True)[0]
    return interpolate(batch.float(), (height, width), mode=interpolation, antialias=True)[0].round_().to(torch.uint8)


class RandomResizedCrop:
    """Crop of at least ``min_scale`` of the area, 3:4 to 4:3, resized to a square; ``flip`` mirrors half of them."""

    def __init__(self, size: int, min_scale: float, *, flip: bool, interpolation: Interpolation = "bilinear") -> None:
        self.size, self.min_scale, self.flip = size, min_scale, flip
        self.interpolation: Interpolation = interpolation

    def __call__(self, image: Tensor) -> Tensor:
        """Crop an image: (3, H, W) uint8 -> (3, size, size) uint8."""
        top, left, height, width = self._box(*image.shape[-2:])
        crop = image[:, top : top + height, left : left + width]
        return _perhaps_mirrored(_squeezed(crop, self.size, self.interpolation), flip=self.flip)

    def _box(self, height: int, width: int) -> tuple[int, int, int, int]:
        """Draw the top, left, height and width of a crop, with the draws of torchvision's transform of that name."""
        for _ in range(10):
            area = height * width * torch.empty(1).uniform_(self.min_scale, 1.0).item()
            ratio = torch.empty(1).uniform_(*LOG_RATIOS).exp().item()
            rows, columns = round(sqrt(area / ratio)), round(sqrt(area * ratio))
            if 0 < rows <= height and 0 < columns <= width:
                top = int(torch.randint(height - rows + 1, (1,)))
                return top, int(torch.randint(width - columns + 1, (1,))), rows, columns
        rows, columns = min(height, round(width / RATIOS[0])), min(width, round(height * RATIOS[1]))
        return (height - rows) // 2, (width - columns) // 2, rows, columns


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
    # with the colors of a pixel adjacent in memory, as a decoder leaves them, resizing takes half the time
    return resize(image.permute(1, 2, 0).contiguous().permute(2, 0, 1), side, side, interpolation)


def _perhaps_mirrored(square: Tensor, *, flip: bool) -> Tensor:
    return square.flip(2) if flip and bool(torch.rand(1) < 0.5) else square
