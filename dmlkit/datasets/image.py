"""Decoding image files of any kind to RGB."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from dmlkit.datasets.base import BadImageError

EXTENSIONS = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".ppm", ".pgm"})
MAX_PIXELS = 80_000_000  # just below the 89 M at which Pillow warns of a decompression bomb


def read_image(path: str | Path) -> Tensor:
    """Decode an image file to (3, H, W) uint8 RGB, upright.

    Grey, palette, CMYK and 16-bit images are converted, transparency is laid on white, the EXIF rotation is
    applied, and of an animation the first frame is taken.

    Raises:
        BadImageError: the file is missing, broken, truncated, larger than 80 megapixels, or no image.
    """
    try:
        with Image.open(path) as image:
            if image.width * image.height > MAX_PIXELS:
                raise BadImageError(f"{path}: {image.width} x {image.height} pixels; expected at most {MAX_PIXELS:,}")
            pixels = np.asarray(to_rgb(ImageOps.exif_transpose(image)))
    except BadImageError:
        raise
    # Pillow's decoders raise these for damaged files, by format
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        reason = "file not found" if isinstance(error, FileNotFoundError) else str(error)
        raise BadImageError(f"{path}: cannot read this image: {reason}") from error
    return torch.from_numpy(pixels.copy()).permute(2, 0, 1)


def to_rgb(image: Image.Image) -> Image.Image:
    """Any Pillow image as 8-bit RGB."""
    if image.mode.startswith("I"):  # Pillow clips 16 bits to 255 instead of scaling them
        image = Image.fromarray((np.asarray(image).clip(0, 65535) // 256).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert("RGB")
