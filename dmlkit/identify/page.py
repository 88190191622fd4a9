"""Pages with small pictures, each one self-contained HTML file, from the template ``page.html.j2``."""

import base64
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from PIL import Image, ImageDraw

from dmlkit.datasets.files.image import read_image, thumbnail
from dmlkit.datasets.files.samples import ImageSamples
from dmlkit.files.escape import printable
from dmlkit.files.image_file import BadImageError, Box, decoding, upright_size
from dmlkit.files.outputs import write_output

MOST = 200  # queries of a page: with 10 neighbors each 2 200 pictures, about 10 MB
HERE = Path(__file__).parent
WIDE = "body { max-width: none; }\np { max-width: 75rem; }\n"
PLACEHOLDER = Markup('<div class="gone">no picture</div>')


def _finalize(value: object) -> object:
    return printable(value) if type(value) is str else value  # without control characters of others' files


TEMPLATES = Environment(
    loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, finalize=_finalize
)
TEMPLATES.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "separators": (",", ":")}
Block = tuple[str, Any]
"""Part of a page: the name of a macro of the template, and its argument."""


@dataclass(frozen=True)
class Picture:
    """Picture of a page."""

    path: str
    lines: Sequence[str] = ()
    stored: bytes | None = None  # JPEG; empty if there is none; None: the file is read
    is_right: bool | None = None  # whether it is a correct result, if known; shown by a mark, a word and a frame
    box: Box | None = None  # box that is drawn into the picture

    def encoded(self) -> str:
        """Return the JPEG in base64; empty if there is none."""
        try:
            stored = drawn_picture(self.path, self.box) if self.stored is None else self.stored
        except BadImageError:
            return ""
        return base64.b64encode(stored).decode()


@dataclass(frozen=True)
class Shelf:
    """Row of a page: a query and its results."""

    asked: Picture
    results: Sequence[Picture]


def write_page(path: Path, title: str, notes: Sequence[str], shelves: Iterable[Shelf], *, rows: str = "queries") -> int:
    """Write a page of the first `MOST` shelves, and return how many of its pictures are missing."""
    listed = list(islice(shelves, MOST + 1))
    blocks: list[Block] = [("text", note) for note in notes]
    blocks += [("shelf", shelf) for shelf in listed[:MOST]]
    if len(listed) > MOST:
        blocks.append(("text", f"The page ends here, after the first {MOST} {rows}."))
    return write_blocks(path, title, blocks, style=WIDE)


def write_blocks(
    path: Path,
    title: str,
    blocks: Sequence[Block] = (),
    sections: Mapping[tuple[str, str], Sequence[Block]] | None = None,
    *,
    style: str,
    script: str = "",
    data: Any = None,
) -> int:
    """Write a page atomically, and return how many of its pictures are placeholders, because their images are missing.

    The page loads nothing, and runs no script except the given one, which its policy allows.

    Args:
        sections: more blocks by their anchors and headings.
    """
    style = (HERE / "page.css").read_text(encoding="utf-8") + style
    scripts = f"script-src {_hash_of(script)}; " if script else ""
    text = TEMPLATES.get_template("page.html.j2").render(
        title=title,
        blocks=blocks,
        sections=sections or {},
        style=Markup(style),
        script=Markup(script),
        data=data,
        placeholder=PLACEHOLDER,
        policy=Markup(
            f"default-src 'none'; {scripts}img-src data:; style-src {_hash_of(style)}; base-uri 'none'; "
            "form-action 'none'"
        ),
    )
    write_output(path, text)
    return text.count(PLACEHOLDER)


def _hash_of(source: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"


def drawn_picture(path: str, box: Box | None) -> bytes:
    """Return an image as a small JPEG, with a rectangle around a box."""
    if box is None:
        return thumbnail(path)
    image = Image.fromarray(read_image(path).permute(1, 2, 0).numpy())
    with decoding(path):
        scale = image.width / upright_size(path)[0]  # below 1 for a very large JPEG
    left, top, right, bottom = (side * scale for side in box[:4])
    line = max(1, round(max(image.size) / 80))  # 2 pixels of the small picture
    for width, color in ((2 * line, "black"), (line, "#ffd33d")):  # visible on light and dark pixels
        corner = max(left, right - 1), max(top, bottom - 1)  # a box may be narrower than a pixel
        ImageDraw.Draw(image).rectangle((left, top, *corner), outline=color, width=width)
    return ImageSamples().picture(torch.from_numpy(np.array(image)).permute(2, 0, 1))
