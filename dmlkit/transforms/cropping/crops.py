"""Random crops, the augmentation of most of the literature."""

import torch
from torch import Tensor

from dmlkit.transforms.cropping.windows import Interpolation, Window, WindowTransform


class RandomResizedCrop(WindowTransform):
    """Crop of at least ``min_scale`` of the area, 3:4 to 4:3, resized to a square and mirrored with probability 1/2.

    Args:
        size: side of the square, in pixels.
        min_scale: smallest share of the area, in 0..1.
        flip: whether to mirror images.
        interpolation: interpolation between pixels.
    """

    def __init__(self, size: int, min_scale: float, *, flip: bool, interpolation: Interpolation = "bilinear") -> None:
        from torchvision.transforms import v2

        super().__init__(size, interpolation, flip=flip)
        self.crop = v2.RandomResizedCrop(size, (min_scale, 1.0))

    def place(self, image: Tensor) -> Window:
        box = self.crop.make_params([image])
        return Window((box["top"], box["left"], box["height"], box["width"]), (self.size, self.size))


class SquareCrop(WindowTransform):
    """Image squeezed to a square, then cropped to a random smaller square and mirrored with probability 1/2.

    Args:
        size: side of the smaller square, in pixels.
        resized: side of the first square, in pixels.
        flip: whether to mirror images.
    """

    def __init__(self, size: int, resized: int, *, flip: bool) -> None:
        super().__init__(size, "bilinear", flip=flip)
        self.resized = resized

    def place(self, image: Tensor) -> Window:
        top, left = torch.randint(0, self.resized - self.size + 1, (2,)).tolist()
        _, height, width = image.shape
        return Window((0, 0, height, width), (self.resized, self.resized), (top, left))
