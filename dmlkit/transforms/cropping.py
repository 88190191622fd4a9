"""Crops of images: where they are cut, and how they are resized."""

from abc import ABC, abstractmethod
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Interpolation = Literal["bilinear", "bicubic"]


class Window(NamedTuple):
    """Crop of an image: a box is cropped and resized, a square is cropped from the result and possibly mirrored.

    Args:
        box: top, left, height and width of the box, in pixels of the image.
        resized: height and width of the resized box.
        offset: top and left of the square in the resized box.
        mirrored: whether left and right are swapped.
    """

    box: tuple[int, int, int, int]
    resized: tuple[int, int]
    offset: tuple[int, int] = (0, 0)
    mirrored: bool = False


class WindowTransform(ABC):
    """Augmentation by a random `Window` of ``size`` x ``size`` pixels; with ``flip`` half of them are mirrored."""

    def __init__(self, size: int, interpolation: Interpolation, *, flip: bool) -> None:
        self.size = size
        self.interpolation: Interpolation = interpolation
        self.flip = flip

    @abstractmethod
    def place(self, image: Tensor) -> Window:
        """Draw a random window of an image (3, H, W), not mirrored."""

    def draw(self, image: Tensor) -> Window:
        """Draw a random window of an image (3, H, W) with torch's global generator."""
        window = self.place(image)
        return window._replace(mirrored=self.flip and bool(torch.rand(1) < 0.5))

    def show(self, image: Tensor, window: Window) -> Tensor:
        """Apply a window: (3, H, W) uint8 -> (3, size, size) uint8."""
        from torchvision.transforms import InterpolationMode
        from torchvision.transforms.v2 import functional

        # with the colors of a pixel adjacent in memory, as a decoder leaves them, resizing takes half the time
        box = cut(image, window).permute(1, 2, 0).contiguous().permute(2, 0, 1)
        size = list(window.resized)
        resized = functional.resize(box, size, InterpolationMode(self.interpolation), antialias=True)
        top, left = window.offset
        square = resized[:, top : top + self.size, left : left + self.size]
        return square.flip(2) if window.mirrored else square

    def __call__(self, image: Tensor) -> Tensor:
        """Draw a window and apply it."""
        return self.show(image, self.draw(image))


def cut(image: Tensor, window: Window) -> Tensor:
    """Return the window's box of an image (3, H, W) as a view."""
    top, left, height, width = window.box
    return image[:, top : top + height, left : left + width]


class Cut(NamedTuple):
    """Box of an image, and the plan by which the device computes the square.

    Args:
        pixels: (3, h, w) uint8.
        plan: 7 numbers: h, w, resized height and width, top and left of the square, 1 if mirrored.
    """

    pixels: Tensor
    plan: tuple[int, ...]


def draw_cut(transform: WindowTransform, image: Tensor) -> Cut:
    """Draw a window of an image (3, H, W) that is to be applied on the device.

    A window with a box larger than twice the square's side is applied here, because one large photograph would
    otherwise enlarge the padded batch.
    """
    window = transform.draw(image)
    height, width = window.box[2:]
    if max(height, width) > 2 * transform.size:
        side = transform.size
        return Cut(transform.show(image, window), (side, side, side, side, 0, 0, 0))
    return Cut(cut(image, window), (height, width, *window.resized, *window.offset, int(window.mirrored)))


def collate_cuts(cuts: list[Cut]) -> tuple[Tensor, Tensor]:
    """Collate boxes of several sizes to (B, 3, H, W) uint8, padded with zeros below and right, and plans (B, 7)."""
    plans = torch.tensor([plan for _, plan in cuts])
    height, width = plans[:, :2].amax(0).tolist()
    pixels = torch.zeros(len(cuts), 3, height, width, dtype=torch.uint8)
    for room, (box, _) in zip(pixels, cuts, strict=True):
        room[:, : box.shape[1], : box.shape[2]] = box
    return pixels, plans


def show_cuts(pixels: Tensor, plans: Tensor, size: int, interpolation: Interpolation) -> Tensor:
    """Apply windows to a batch on its device; pixels differ from `WindowTransform.show` by at most 2 of 255.

    Resizing with antialiasing is linear in columns and in rows, so it is two batched matrix products, whose matrices
    include the crop and the mirroring. Between the products, pixels are rounded to 0..255, as in the loader; otherwise
    a cubic overshoots by up to 26 in noise.

    Args:
        pixels: (B, 3, H, W) uint8 of `collate_cuts`.
        plans: (B, 7) int64 of `collate_cuts`, on the same device.
        size: side of the squares, in pixels.
        interpolation: interpolation between pixels.

    Returns:
        (B, 3, size, size) uint8.

    Example:
        >>> pixels = torch.tensor([[0, 100, 200, 0]], dtype=torch.uint8).expand(1, 3, 2, 4)
        >>> plans = torch.tensor([[1, 3, 1, 3, 0, 1, 1]])  # the square at column 1 of the box 1 x 3, mirrored
        >>> show_cuts(pixels, plans, 1, "bilinear")[0, 0], show_cuts(pixels[..., :3], plans, 1, "bilinear")[0, 0]
        (tensor([[100]], dtype=torch.uint8), tensor([[100]], dtype=torch.uint8))
    """
    height, width, resized_height, resized_width, top, left, mirrored = plans.unbind(1)
    rows = resizing_matrix(height, resized_height, top, size, pixels.shape[2], interpolation)
    columns = resizing_matrix(width, resized_width, left, size, pixels.shape[3], interpolation)
    columns = torch.where(mirrored.bool()[:, None, None], columns.flip(1), columns)
    narrow = torch.einsum("bchw,bxw->bchx", pixels.float(), columns).round_().clamp_(0, 255)
    return torch.einsum("byh,bchx->bcyx", rows, narrow).round_().clamp_(0, 255).byte()


def resizing_matrix(
    lengths: Tensor, resized: Tensor, offsets: Tensor, size: int, room: int, interpolation: Interpolation
) -> Tensor:
    """Compute the matrices of antialiased resizing, as in torch and Pillow, for lines of pixels.

    If a line of n pixels is resized to m pixels, the center of new pixel x is c = (x + 1/2) n/m. Old pixel j has the
    weight f((j + 1/2 - c) / max(n/m, 1)), normalized over j; f is the triangle, or Keys' cubic with a = -1/2.

    Args:
        lengths: (B,) number of pixels n of each line.
        resized: (B,) number of pixels m of the resized line.
        offsets: (B,) first new pixel to keep.
        size: number of new pixels to keep.
        room: number of pixels of the longest line; shorter lines are padded at the end.
        interpolation: kind of f.

    Returns:
        (B, size, room) float32.

    Example:
        >>> one = torch.tensor([1])
        >>> resizing_matrix(4 * one, 2 * one, 0 * one, 2, 5, "bilinear")
        tensor([[[0.4286, 0.4286, 0.1429, 0.0000, 0.0000],
                 [0.0000, 0.1429, 0.4286, 0.4286, 0.0000]]])
    """
    scale = (lengths / resized)[:, None, None]
    kept = torch.arange(size, device=lengths.device) + offsets[:, None]
    pixel = torch.arange(room, device=lengths.device)
    distance = (pixel + 0.5 - scale * (kept[..., None] + 0.5)).abs() / scale.clamp(min=1)
    if interpolation == "bilinear":
        weights = (1 - distance).clamp(min=0)
    else:
        near = (1.5 * distance - 2.5) * distance**2 + 1
        far = ((-0.5 * distance + 2.5) * distance - 4) * distance + 2
        weights = torch.where(distance < 1, near, torch.where(distance < 2, far, 0))
    weights = weights * (pixel < lengths[:, None, None])
    return weights / weights.sum(2, keepdim=True)


class RandomResizedCrop(WindowTransform):
    """Crop of at least ``min_scale`` of the area, 3:4 to 4:3, resized to a square and mirrored with probability 1/2.

    Args:
        min_scale: smallest share of the area, in 0..1.
    """

    def __init__(self, size: int, min_scale: float, *, flip: bool, interpolation: Interpolation = "bilinear") -> None:
        from torchvision.transforms import v2

        super().__init__(size, interpolation, flip=flip)
        self.crop = v2.RandomResizedCrop(size, (min_scale, 1.0))

    def place(self, image: Tensor) -> Window:
        box = self.crop.make_params([image])
        return Window((box["top"], box["left"], box["height"], box["width"]), (self.size, self.size))


class SquareCrop(WindowTransform):
    """Image squeezed to a square of ``resized`` pixels and cropped to a random square of ``size`` pixels."""

    def __init__(self, size: int, resized: int, *, flip: bool) -> None:
        super().__init__(size, "bilinear", flip=flip)
        self.resized = resized

    def place(self, image: Tensor) -> Window:
        top, left = torch.randint(0, self.resized - self.size + 1, (2,)).tolist()
        _, height, width = image.shape
        return Window((0, 0, height, width), (self.resized, self.resized), (top, left))
