"""Random crops: the augmentation of most of the literature, with different numbers."""

import torch
from torch import Tensor

from dmlkit.transforms.cropping.windows import Interpolation, Window, WindowTransform


class RandomResizedCrop(WindowTransform):
    """A crop of at least ``min_scale`` of the area, 3:4 to 4:3, resized to a square, and mirrored half of the time.

    Args:
        size: of the square, pixels.
        min_scale: share of the area, in 0..1.
        flip: mirror at all.
        interpolation: between pixels.
    """

    def __init__(self, size: int, min_scale: float, *, flip: bool, interpolation: Interpolation = "bilinear") -> None:
        from torchvision.transforms import v2

        super().__init__(size, interpolation, flip=flip)
        self.crop = v2.RandomResizedCrop(size, (min_scale, 1.0))

    def place(self, image: Tensor) -> Window:
        box = self.crop.make_params([image])
        return Window((box["top"], box["left"], box["height"], box["width"]), (self.size, self.size))


class SquareCrop(WindowTransform):
    """The whole image squeezed to a square, then a random smaller square, mirrored half of the time.

    Args:
        size: of the smaller square, pixels.
        resized: side of the first square, pixels.
        flip: mirror at all.
    """

    def __init__(self, size: int, resized: int, *, flip: bool) -> None:
        super().__init__(size, "bilinear", flip=flip)
        self.resized = resized

    def place(self, image: Tensor) -> Window:
        top, left = torch.randint(0, self.resized - self.size + 1, (2,)).tolist()
        _, height, width = image.shape
        return Window((0, 0, height, width), (self.resized, self.resized), (top, left))
