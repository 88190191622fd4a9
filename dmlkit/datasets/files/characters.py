"""Characters and faces of matplotlib's DejaVu fonts, which every installation has."""

from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

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
VERSION = 1  # version of the rendering; the images of a pair (seed, version) never change


@cache
def font(face: str, points: int) -> ImageFont.FreeTypeFont:
    """Load a face of matplotlib's DejaVu fonts, without the shaping library, which not every build has."""
    return ImageFont.truetype(str(font_folder() / face), points, layout_engine=ImageFont.Layout.BASIC)


def font_folder() -> Path:
    """Return the folder of matplotlib's fonts."""
    import matplotlib

    return Path(matplotlib.get_data_path()) / "fonts" / "ttf"


def character_classes(classes: int, shapes: int) -> list[str]:
    """Return the characters of each class, in a fixed order; every class has ``shapes`` characters.

    A class has every n-th of n x ``shapes`` characters sorted by their Unicode names, which begin with the script. So a
    class never has two characters of a script with at most n characters, and characters that differ only by an accent
    are in different classes.

    Raises:
        UserError: the fonts have too few characters.

    Example:
        >>> [len(characters) for characters in character_classes(200, 3)[:4]]
        [3, 3, 3, 3]
        >>> "".join(character_classes(200, 1)) == "".join(distinct_characters()[:200])
        True
    """
    import unicodedata

    count, characters = classes * shapes, distinct_characters()
    if len(characters) < count:
        raise UserError(
            f"dataset.classes: got {classes} classes of {shapes} characters, but the fonts have only "
            f"{len(characters)} characters; use fewer classes or shapes_per_class"
        )
    ranked = sorted(range(count), key=lambda rank: unicodedata.name(characters[rank]))
    ranks = sorted((ranked[first::classes] for first in range(classes)), key=min)
    return ["".join(characters[rank] for rank in own) for own in ranks]


@cache
def distinct_characters() -> tuple[str, ...]:
    """Return the letters, numbers and symbols that all faces have and that look different, in a fixed random order.

    Blank characters and those that look exactly like an earlier one (A and Greek Α) are excluded.
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
