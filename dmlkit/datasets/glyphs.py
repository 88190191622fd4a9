"""Glyphs dataset: letters, digits and symbols rendered from fonts that every installation has."""

import unicodedata
from collections.abc import Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from pydantic import Field, NonNegativeInt
from torch import Tensor

from dmlkit.datasets.base import DatasetConfig, Split
from dmlkit.datasets.files.dataset import Dataset, PickedSamples
from dmlkit.datasets.files.listing import Listing
from dmlkit.errors import OptionError


class GlyphsConfig(DatasetConfig, frozen=True):
    """Rendered characters: real, fine-grained images (o, ó, ọ, ö) without a download.

    A class is one character, or several unrelated ones; its images show 12 DejaVu faces with small rotations, scales,
    shifts and noise. The first half of the classes is for training, the rest for testing. Wrong labels and the long
    tail apply only to the training images, after the validation classes are held out. The ``levels`` are always three,
    e.g. ``[script, letter, character]``: ö and ó are two classes of the letter o of the Latin script.
    """

    name: Literal["glyphs"] = "glyphs"
    classes: Annotated[int, Field(ge=4, le=1800)] = 200
    """Number of classes; the first half is for training."""
    shapes_per_class: Annotated[int, Field(ge=1, le=12)] = 1
    """Number of characters per class, from different scripts where possible; no character is in two classes."""
    images_per_class: Annotated[int, Field(ge=2, le=1000)] = 24
    """Number of images per class, which cycle through its characters and the 12 faces."""
    size: Annotated[int, Field(ge=16, le=128)] = 32
    """Side of an image, in pixels."""
    difficulty: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Difficulty; at 1 rotations and shifts are three times as large, characters are smaller, and there is more noise,
    with lines across the image and a patch that hides a part of it."""
    noise: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the training images with a wrong label, drawn uniformly from the other training classes."""
    tail: Annotated[float, Field(ge=1)] = 1.0
    """Number of images of the first training class divided by that of the last; class sizes decrease geometrically."""
    seed: NonNegativeInt = 0
    """Seed of the images and the wrong labels, independent of the recipe's seed."""

    def load(self, split: Literal["train", "test", "all"]) -> "Glyphs":
        half = self.classes // 2
        span = {"train": slice(half), "test": slice(half, None), "all": slice(None)}[split]
        if self.images_per_class < self.shapes_per_class:
            raise OptionError(
                "dataset.images_per_class",
                f"got {self.images_per_class}, expected at least {self.shapes_per_class} (shapes_per_class)",
            )
        shown = character_classes(self.classes, self.shapes_per_class)[span]
        images = Glyphs(shown, self.images_per_class, self.size, self.seed, difficulty=self.difficulty)
        if self.levels:
            if self.shapes_per_class > 1:
                raise OptionError(
                    "dataset.levels", "needs shapes_per_class 1: several characters have no common letter"
                )
            images.class_names = tuple(map(character_path, shown))
        return images

    def images_of(self, listing: Listing | None, split: Split) -> Dataset:
        images = super().images_of(listing, split)
        if split != "train" or (self.noise == 0 and self.tail == 1):
            return images
        if self.images_per_class / self.tail < 2:
            raise OptionError(
                "dataset.tail",
                f"{self.tail:g} leaves fewer than 2 of {self.images_per_class} images in the last class; "
                f"expected at most {self.images_per_class / 2:g}",
            )
        if self.noise and len(images.class_names) < 2:
            raise OptionError(
                "dataset.noise",
                "there is only one training class, so no label can be wrong; use more classes or noise 0",
            )
        rows = long_tail(images.labels, self.tail)
        return PickedSamples(images, rows, wrong_labels(images.labels[rows], self.noise, seed=self.seed))


class Glyphs(Dataset):
    """Dataset of rendered characters, kept in memory.

    The arguments are those of `GlyphsConfig`, with the characters of each class. An image depends only on the seed,
    its character and its number.

    Example:
        >>> glyphs = Glyphs(["a", "äЖ"], images_per_class=3, size=32, seed=0)
        >>> image, label = glyphs[5]
        >>> image.shape, label, glyphs.class_names[1], list(glyphs.paths[3:])
        (torch.Size([3, 32, 32]), 1, 'U+00E4-U+0416', ['U+00E4/0', 'U+0416/0', 'U+00E4/1'])
    """

    in_memory = True

    def __init__(
        self, classes: Sequence[str], images_per_class: int, size: int, seed: int, *, difficulty: float = 0.0
    ) -> None:
        shown = [
            (characters[image % len(characters)], image // len(characters))
            for characters in classes
            for image in range(images_per_class)
        ]
        super().__init__(
            torch.arange(len(classes)).repeat_interleave(images_per_class),
            ["-".join(map(code_point, characters)) for characters in classes],
            [f"{code_point(character)}/{image}" for character, image in shown],
        )
        draw = drawn if len(shown) * size**2 <= MOST_KEPT else drawn.__wrapped__
        self.pixels = draw(tuple(shown), size, seed, difficulty)

    def sample(self, index: int) -> Tensor:
        return self.pixels[index].expand(3, -1, -1)


@lru_cache(maxsize=8)
def drawn(shown: tuple[tuple[str, int], ...], size: int, seed: int, difficulty: float) -> Tensor:
    """Draw images (N, size, size) uint8, each of a character and a number, see `render`.

    The runs of a study draw the same ones: 7 of the 58 s of processor time of a run of modes_claims.yaml.
    """
    return torch.from_numpy(np.stack([render(character, image, size, seed, difficulty) for character, image in shown]))


def character_path(character: str) -> str:
    """Return the script, the letter without accents and case, and the code point of a character as a path.

    Example:
        >>> character_path("Ö"), character_path("Ж")
        ('latin/U+006F/U+00D6', 'cyrillic/U+0436/U+0416')
    """
    script = unicodedata.name(character, "none").split()[0].lower()
    letter = unicodedata.normalize("NFD", character)[0].lower()[0]
    return f"{script}/{code_point(letter)}/{code_point(character)}"


def code_point(character: str) -> str:
    """Return the code point of a character, such as U+00E4."""
    return f"U+{ord(character):04X}"


def render(character: str, image: int, size: int, seed: int, difficulty: float = 0.0) -> np.ndarray:
    """Draw one image (size, size) uint8, dark on light: face ``image`` mod 12, perturbed at random."""
    key = [VERSION, seed, ord(character), image]
    generator = np.random.default_rng(key)
    stronger = 1 + 2 * difficulty
    angle = stronger * generator.uniform(-12, 12)  # degrees
    shift = stronger * generator.uniform(-0.06, 0.06, 2)  # shares of the side
    scale, noise = generator.uniform(0.8 - 0.3 * difficulty, 1.05), generator.uniform(0, 16 + 48 * difficulty)
    canvas = Image.new("L", (2 * size, 2 * size), 0)  # drawn at twice the size, then reduced, for smooth edges
    ImageDraw.Draw(canvas).text(
        (size + 2 * size * shift[0], size + 2 * size * shift[1]),
        character,
        fill=255,
        font=font(FACES[image % len(FACES)], round(1.3 * size * scale)),
        anchor="mm",
    )
    canvas = canvas.rotate(angle, Image.Resampling.BILINEAR)
    if difficulty:  # a separate generator, so that the other random numbers do not change
        clutter(canvas, difficulty, np.random.default_rng([*key, 1]))
    ink = np.asarray(canvas.reduce(2), dtype=np.float64)
    return (255 - ink + generator.normal(0, noise, ink.shape)).clip(0, 255).astype(np.uint8)


def clutter(canvas: Image.Image, difficulty: float, generator: np.random.Generator) -> None:
    """Hide a part of a drawing under a blank patch, and draw up to five lines across it."""
    side, draw = canvas.width, ImageDraw.Draw(canvas)
    width, height = 0.4 * difficulty * side * generator.uniform(0.5, 1, 2)
    left, top = generator.uniform(0.15, 0.85, 2) * side - (width / 2, height / 2)
    draw.rectangle((left, top, left + width, top + height), fill=0)
    for _ in range(round(5 * difficulty * generator.uniform(0.4, 1))):
        ends = generator.uniform(0, side, 4).tolist()
        draw.line(ends, fill=int(generator.integers(80, 256)), width=max(1, round(0.03 * side)))


FACES = tuple(
    f"DejaVu{family}{style}.ttf"
    for family, styles in {
        "Sans": ("", "-Bold", "-Oblique", "-BoldOblique"),
        "SansMono": ("", "-Bold", "-Oblique", "-BoldOblique"),
        "Serif": ("", "-Bold", "-Italic", "-BoldItalic"),
    }.items()
    for style in styles
)
VERSION = 1  # version of the rendering; the images of a pair (seed, version) never change
MOST_KEPT = 16 * 2**20  # bytes: larger sets of images are drawn again, so that 8 sets keep at most 128 MB


@cache
def font(face: str, points: int) -> ImageFont.FreeTypeFont:
    """Load a face of matplotlib's DejaVu fonts, without the shaping library, which not every build has."""
    return ImageFont.truetype(str(font_folder() / face), points, layout_engine=ImageFont.Layout.BASIC)


def font_folder() -> Path:
    """Return the folder of matplotlib's fonts."""
    from matplotlib import get_data_path

    return Path(get_data_path(), "fonts", "ttf")


def character_classes(classes: int, shapes: int) -> list[str]:
    """Return the characters of each class, in a fixed order; every class has ``shapes`` characters.

    A class has every n-th of n x ``shapes`` characters sorted by their Unicode names, which begin with the script. So a
    class never has two characters of a script with at most n characters, and characters that differ only by an accent
    are in different classes.

    Example:
        >>> [len(characters) for characters in character_classes(200, 3)[:4]]
        [3, 3, 3, 3]
        >>> "".join(character_classes(200, 1)) == "".join(distinct_characters()[:200])
        True
    """
    count, characters = classes * shapes, distinct_characters()
    if len(characters) < count:
        raise OptionError(
            "dataset.classes",
            f"got {classes} classes of {shapes} characters, but the fonts have only "
            f"{len(characters)} characters; use fewer classes or shapes_per_class",
        )
    ranked = sorted(range(count), key=lambda rank: unicodedata.name(characters[rank]))
    ranks = sorted((ranked[first::classes] for first in range(classes)), key=min)
    return ["".join(characters[rank] for rank in class_ranks) for class_ranks in ranks]


@cache
def distinct_characters() -> tuple[str, ...]:
    """Return the letters, numbers and symbols that all faces have and that look different, in a fixed random order.

    Blank characters and those that look exactly like an earlier one (A and Greek Α) are excluded.
    """
    from matplotlib.ft2font import FT2Font

    shared = set.intersection(*(set(FT2Font(str(font_folder() / face)).get_charmap()) for face in FACES))
    distinct: dict[bytes, str] = {}
    for character in map(chr, sorted(shared)):
        if unicodedata.category(character)[0] in "LNS":
            canvas = Image.new("L", (64, 64), 0)
            ImageDraw.Draw(canvas).text((32, 32), character, fill=255, font=font(FACES[0], 32), anchor="mm")
            if canvas.getbbox():
                distinct.setdefault(canvas.tobytes(), character)
    characters = [*distinct.values()]
    return tuple(characters[index] for index in np.random.default_rng(VERSION).permutation(len(characters)))


def long_tail(labels: Tensor, ratio: float) -> Tensor:
    """Return the rows (n,) to keep so that class sizes decrease geometrically: the first images of each class.

    Class c of C classes with n images each keeps round(n ratio^(-c / (C - 1))) images, so the last keeps n / ratio.
    Labels are (N,) int64 in 0..C-1.

    Example:
        >>> labels = torch.arange(3).repeat_interleave(16)
        >>> labels[long_tail(labels, 4)].bincount().tolist()
        [16, 8, 4]
    """
    sizes, rows = labels.bincount().tolist(), list[Tensor]()
    for label, size in enumerate(sizes):
        kept = round(size * ratio ** (-label / max(1, len(sizes) - 1)))
        rows.append((labels == label).nonzero()[:kept, 0])
    return torch.cat(rows).sort().values


def wrong_labels(labels: Tensor, share: float, *, seed: int) -> Tensor:
    """Replace exactly ``round(share N)`` labels by wrong ones, drawn uniformly from the other classes.

    Labels are (N,) int64 in 0..C-1, C at least 2.

    Example:
        >>> labels = torch.arange(4).repeat_interleave(5)
        >>> int((wrong_labels(labels, 0.2, seed=0) != labels).sum())
        4
    """
    generator = torch.Generator().manual_seed(seed)
    classes, count = int(labels.max()) + 1, round(share * len(labels))
    rows = torch.randperm(len(labels), generator=generator)[:count]
    changed = labels.clone()
    changed[rows] = (labels[rows] + torch.randint(1, classes, (count,), generator=generator)) % classes
    return changed
