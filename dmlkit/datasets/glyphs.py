"""Glyphs: letters, digits and signs rendered from fonts that every installation has."""

from functools import cache
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from pydantic import Field, NonNegativeInt
from torch import Tensor

from dmlkit.datasets.base import DatasetConfig
from dmlkit.datasets.files.dataset import Dataset
from dmlkit.errors import UserError

FACES = tuple(
    f"DejaVu{family}{style}.ttf"
    for family, styles in {
        "Sans": ("", "-Bold", "-Oblique", "-BoldOblique"),
        "SansMono": ("", "-Bold", "-Oblique", "-BoldOblique"),
        "Serif": ("", "-Bold", "-Italic", "-BoldItalic"),
    }.items()
    for style in styles
)
VERSION = 1  # of the rendering; the images of a (seed, version) never change


class GlyphsConfig(DatasetConfig, frozen=True):
    """Rendered characters: real, fine-grained images (o, ó, ọ, ö) without a download.

    A class is a character; its images are 12 DejaVu faces under small rotations, scales, shifts and noise. The
    first half of the classes trains, the rest tests.
    """

    name: Literal["glyphs"] = "glyphs"
    classes: Annotated[int, Field(ge=4, le=1800)] = 200
    """Characters, the first half of which trains."""
    images_per_class: Annotated[int, Field(ge=2, le=1000)] = 24
    """Images of a character, drawn in turn from 12 faces."""
    size: Annotated[int, Field(ge=16, le=128)] = 32
    """Side of an image, in pixels."""
    seed: NonNegativeInt = 0
    """Decides the images; the recipe's own seed does not."""

    def load(self, split: Literal["train", "test", "all"]) -> "Glyphs":
        half = self.classes // 2
        span = {"train": range(half), "test": range(half, self.classes), "all": range(self.classes)}[split]
        characters = distinct_characters()
        if len(characters) < self.classes:
            raise UserError(f"dataset.classes: the fonts share {len(characters)} characters, got {self.classes}")
        return Glyphs([characters[index] for index in span], self.images_per_class, self.size, self.seed)


class Glyphs(Dataset):
    """Images of characters, rendered once and kept in memory.

    Args:
        characters: one class each.
        images_per_class: images of each, over the 12 faces in turn.
        size: side of the square images, pixels.
        seed: with the character, it alone decides an image: other classes and counts change nothing.

    Example:
        >>> glyphs = Glyphs(["a", "ä"], images_per_class=3, size=32, seed=0)
        >>> image, label = glyphs[5]
        >>> image.shape, label, glyphs.paths[5]
        (torch.Size([3, 32, 32]), 1, 'U+00E4/2')
    """

    in_memory = True

    def __init__(self, characters: list[str], images_per_class: int, size: int, seed: int) -> None:
        names = [f"U+{ord(character):04X}" for character in characters]
        super().__init__(
            torch.arange(len(names)).repeat_interleave(images_per_class),
            names,
            [f"{name}/{image}" for name in names for image in range(images_per_class)],
        )
        self.pixels = torch.from_numpy(
            np.stack(
                [render(character, image, size, seed) for character in characters for image in range(images_per_class)]
            )
        )

    def sample(self, index: int) -> Tensor:
        return self.pixels[index].expand(3, -1, -1)


def render(character: str, image: int, size: int, seed: int) -> np.ndarray:
    """Draw one image (size, size) uint8, dark on light: face ``image`` mod 12, perturbed at random."""
    generator = np.random.default_rng([VERSION, seed, ord(character), image])
    angle, shift = generator.uniform(-12, 12), generator.uniform(-0.06, 0.06, 2)  # degrees, shares of the side
    scale, noise = generator.uniform(0.8, 1.05), generator.uniform(0, 16)
    canvas = Image.new("L", (2 * size, 2 * size), 0)  # drawn at twice the size, then reduced: smooth edges
    ImageDraw.Draw(canvas).text(
        (size + 2 * size * shift[0], size + 2 * size * shift[1]),
        character,
        fill=255,
        font=font(FACES[image % len(FACES)], round(1.3 * size * scale)),
        anchor="mm",
    )
    ink = np.asarray(canvas.rotate(angle, Image.Resampling.BILINEAR).reduce(2), dtype=np.float64)
    return (255 - ink + generator.normal(0, noise, ink.shape)).clip(0, 255).astype(np.uint8)


@cache
def font(face: str, points: int) -> ImageFont.FreeTypeFont:
    """A face of matplotlib's DejaVu fonts, without the shaping library that not every build has."""
    return ImageFont.truetype(str(font_folder() / face), points, layout_engine=ImageFont.Layout.BASIC)


def font_folder() -> Path:
    """Where matplotlib keeps its fonts."""
    import matplotlib

    return Path(matplotlib.get_data_path()) / "fonts" / "ttf"


@cache
def distinct_characters() -> tuple[str, ...]:
    """Letters, numbers and symbols that all faces have and that look different, in a fixed shuffled order.

    Blank characters and those that a face draws exactly like an earlier one (A and Greek Α) are dropped.
    """
    import unicodedata

    from matplotlib.ft2font import FT2Font

    shared = set.intersection(*(set(FT2Font(str(font_folder() / face)).get_charmap()) for face in FACES))
    seen: set[bytes] = set()
    kept: list[str] = []
    for code in sorted(shared):
        character = chr(code)
        if unicodedata.category(character)[0] not in "LNS":
            continue
        canvas = Image.new("L", (64, 64), 0)
        ImageDraw.Draw(canvas).text((32, 32), character, fill=255, font=font(FACES[0], 32), anchor="mm")
        looks = canvas.tobytes()
        if looks not in seen and canvas.getbbox():
            seen.add(looks)
            kept.append(character)
    order = np.random.default_rng(VERSION).permutation(len(kept))
    return tuple(kept[index] for index in order)
