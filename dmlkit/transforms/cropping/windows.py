"""Windows: what of an image a training step shows, drawn in the loader and shown there or on a GPU."""

from abc import ABC, abstractmethod
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Interpolation = Literal["bilinear", "bicubic"]


class Window(NamedTuple):
    """What becomes of an image: a box is cut out and resized, a square is cut out of that, and maybe mirrored.

    Args:
        box: top, left, height and width of the box, pixels of the image.
        resized: height and width that the box becomes.
        offset: top and left of the square in the resized box.
        mirrored: left and right change places.
    """

    box: tuple[int, int, int, int]
    resized: tuple[int, int]
    offset: tuple[int, int] = (0, 0)
    mirrored: bool = False


class WindowTransform(ABC):
    """An augmentation that is a random `Window`.

    Args:
        size: of the square, pixels.
        interpolation: between pixels.
        flip: mirror half of the images.
    """

    def __init__(self, size: int, interpolation: Interpolation, *, flip: bool) -> None:
        self.size = size
        self.interpolation: Interpolation = interpolation
        self.flip = flip

    @abstractmethod
    def place(self, image: Tensor) -> Window:
        """A random window of an image (3, H, W), not mirrored."""

    def draw(self, image: Tensor) -> Window:
        """A random window of an image (3, H, W), by torch's global generator."""
        window = self.place(image)
        return window._replace(mirrored=self.flip and bool(torch.rand(1) < 0.5))

    def show(self, image: Tensor, window: Window) -> Tensor:
        """(3, H, W) uint8 -> (3, size, size) uint8."""
        from torchvision.transforms import InterpolationMode
        from torchvision.transforms.v2 import functional

        # a box whose colours lie together, as a decoder leaves them, is resized in half the time of a view of it
        box = cut(image, window).permute(1, 2, 0).contiguous().permute(2, 0, 1)
        size = list(window.resized)
        resized = functional.resize(box, size, InterpolationMode(self.interpolation), antialias=True)
        top, left = window.offset
        square = resized[:, top : top + self.size, left : left + self.size]
        return square.flip(2) if window.mirrored else square

    def __call__(self, image: Tensor) -> Tensor:
        """Draw a window and show it."""
        return self.show(image, self.draw(image))


def cut(image: Tensor, window: Window) -> Tensor:
    """The window's box of an image (3, H, W), as a view."""
    top, left, height, width = window.box
    return image[:, top : top + height, left : left + width]


class Cut(NamedTuple):
    """A box cut out of an image, and what the device is to make of it.

    Args:
        pixels: (3, h, w) uint8.
        plan: 7 numbers: h, w, height and width resized to, top and left of the square, 1 if mirrored.
    """

    pixels: Tensor
    plan: tuple[int, ...]


def draw_cut(transform: WindowTransform, image: Tensor) -> Cut:
    """Draw a window of an image (3, H, W), and leave it to the device to show it.

    A box of more than twice the side of the square is shown here, so that one large photograph does not make room
    for as many as a batch has.
    """
    window = transform.draw(image)
    height, width = window.box[2:]
    if max(height, width) > 2 * transform.size:
        side = transform.size
        return Cut(transform.show(image, window), (side, side, side, side, 0, 0, 0))
    return Cut(cut(image, window), (height, width, *window.resized, *window.offset, int(window.mirrored)))


def collate_cuts(cuts: list[Cut]) -> tuple[Tensor, Tensor]:
    """Boxes of several sizes as one batch: (B, 3, H, W) uint8 with zeros below and to the right, and plans (B, 7)."""
    plans = torch.tensor([plan for _, plan in cuts])
    height, width = plans[:, :2].amax(0).tolist()
    pixels = torch.zeros(len(cuts), 3, height, width, dtype=torch.uint8)
    for room, (box, _) in zip(pixels, cuts, strict=True):
        room[:, : box.shape[1], : box.shape[2]] = box
    return pixels, plans


def show_cuts(pixels: Tensor, plans: Tensor, size: int, interpolation: Interpolation) -> Tensor:
    """What `WindowTransform.show` does, for a batch at once on its device, within 2 of 255.

    Resizing with antialiasing is linear in columns and in rows, so two batched matrix products do it, with the crop
    and the mirroring in the matrices. Between the two pixels are rounded to 0..255, as the loader does: a cubic
    overshoots by up to 26 in noise otherwise.

    Args:
        pixels: (B, 3, H, W) uint8 of `collate_cuts`.
        plans: (B, 7) int64 of `collate_cuts`, on the same device.
        size: of the squares, pixels.
        interpolation: between pixels.

    Returns:
        (B, 3, size, size) uint8.

    Example:
        >>> pixels = torch.tensor([[0, 100, 200, 0]], dtype=torch.uint8).expand(1, 3, 2, 4)
        >>> plans = torch.tensor([[1, 3, 1, 3, 0, 1, 1]])  # of the box 1 x 3 the square from column 1 on, mirrored
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
    """What each of ``size`` pixels takes from each pixel of a line, by torch's and Pillow's antialiased resizing.

    Pixel x of a line of n pixels that becomes m long has its centre at c = (x + 1/2) n/m. Pixel j has the weight
    f((j + 1/2 - c) / max(n/m, 1)), normalized over j; f is the triangle, or Keys' cubic with a = -1/2.

    Args:
        lengths: (B,) pixels of the line.
        resized: (B,) pixels that it becomes.
        offsets: (B,) the first of these to keep.
        size: how many of these to keep.
        room: pixels of the longest line; shorter ones have padding behind.
        interpolation: f.

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
