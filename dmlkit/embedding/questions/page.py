"""Queries and their results as one self-contained HTML file with small pictures."""

import base64
import hashlib
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import torch
from PIL import Image, ImageDraw

from dmlkit.datasets.files.image import read_image, thumbnail, upright_size
from dmlkit.datasets.files.samples import ImageSamples
from dmlkit.files.atomic import atomic_write
from dmlkit.files.escape import html
from dmlkit.files.image_file import BadImageError, Box, decoding
from dmlkit.files.outputs import writing

MOST = 200  # queries of a page: with 10 neighbors each 2 200 pictures, about 10 MB
STYLE = """
:root { color-scheme: light dark; font: 15px/1.4 system-ui, sans-serif; }
body { margin: 0 auto; padding: 1rem; max-width: 75rem; }
h1 { font-size: 1.3rem; overflow-wrap: anywhere; }
section.shelf { border-top: 1px solid color-mix(in srgb, currentColor 25%, transparent); padding: 1rem 0; }
section.shelf, .found { display: flex; flex-wrap: wrap; gap: .75rem; align-items: flex-start; }
.found { flex: 1 1 16rem; }
figure { margin: 0; width: 7.5rem; }
.asked img, .asked .gone { outline: 3px solid light-dark(#0969da, #58a6ff); outline-offset: -3px; }
img, .gone { display: flex; width: 7.5rem; height: 7.5rem; object-fit: contain; align-items: center;
  justify-content: center; background: color-mix(in srgb, currentColor 8%, transparent); }
figcaption { font-size: .8rem; overflow-wrap: anywhere; padding-top: .25rem; }
figcaption span { display: block; }
.name { opacity: .7; }
.right img, .right .gone { outline-offset: -3px; outline: 3px solid light-dark(#1a7f37, #4ac26b); }
.wrong img, .wrong .gone { outline-offset: -3px; outline: 3px dashed light-dark(#b35900, #f0a04b); }
"""
WIDE = "body { max-width: none; }\np { max-width: 75rem; }\n"


@dataclass(frozen=True)
class Picture:
    """Picture of a page.

    Args:
        lines: text below it, in addition to the path.
        stored: JPEG; empty if there is none; None: the file is read.
        box: box that is drawn into the picture.
        is_right: whether it is a correct result, if known; shown by a mark, a word and a frame.
    """

    path: str
    lines: Sequence[str] = ()
    stored: bytes | None = None
    is_right: bool | None = None
    box: Box | None = None


@dataclass(frozen=True)
class Shelf:
    """Row of a page: a query and its results."""

    asked: Picture
    found: Sequence[Picture]


class Page:
    """HTML file while it is written.

    Args:
        file: text file whose head is written.

    Attributes:
        gone: number of pictures that are placeholders, because their images are missing.
    """

    def __init__(self, file: IO[str]) -> None:
        self.file = file
        self.gone = 0

    def text(self, text: str) -> None:
        """Write a paragraph."""
        self.markup(f"<p>{html(text)}</p>")

    def markup(self, markup: str) -> None:
        """Write HTML in which all external text is already escaped."""
        self.file.write(f"{markup}\n")

    def figures(self, pictures: Iterable[Picture]) -> str:
        """Return pictures as HTML, and count missing ones."""
        found = [_figure(picture) for picture in pictures]
        self.gone += sum("<img" not in figure for figure in found)
        return "\n".join(found)

    def shelf(self, shelf: Shelf) -> None:
        """Write a row of pictures."""
        asked, rest = self.figures([shelf.asked]), self.figures(shelf.found)
        self.markup(
            f'<section class="shelf"><div class="asked">{asked}</div>\n<div class="found">{rest}</div></section>'
        )


@contextmanager
def open_page(path: Path, title: str, *, style: str = "", script: str = "") -> Generator[Page]:
    """Open a page that is written atomically; it loads nothing, and runs no script except the given one.

    Args:
        style: CSS in addition to `STYLE`.
        script: JavaScript that runs when the page is loaded; the policy of the page allows it by its hash.

    Raises:
        UserError: the page cannot be written.
    """
    with writing(path), atomic_write(path) as partial, partial.open("w", encoding="utf-8") as file:
        file.write(_head(title, STYLE + style, script))
        yield Page(file)
        file.write(f"<script>{script}</script>\n" if script else "")
        file.write("</body>\n</html>\n")


def write_page(path: Path, title: str, notes: Sequence[str], shelves: Iterable[Shelf], *, rows: str = "queries") -> int:
    """Write a page of shelves.

    Args:
        notes: lines below the title.
        shelves: rows, of which the first `MOST` are shown.
        rows: plural noun for the rows.

    Returns:
        Number of pictures that are placeholders, because their images are missing.

    Raises:
        UserError: the page cannot be written.
    """
    with open_page(path, title, style=WIDE) as page:
        for note in notes:
            page.text(note)
        for number, shelf in enumerate(shelves):
            if number == MOST:
                page.text(f"The page ends here, after the first {MOST} {rows}.")
                break
            page.shelf(shelf)
    return page.gone


def _head(title: str, style: str, script: str) -> str:
    scripts = f"script-src {_hash_of(script)}; " if script else ""
    policy = f"default-src 'none'; {scripts}img-src data:; style-src {_hash_of(style)}"
    policy += "; base-uri 'none'; form-action 'none'"
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<meta name="generator" content="dmlkit">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n<h1>{html(title)}</h1>\n"
    )


def _hash_of(source: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"


def drawn_picture(path: str, box: Box | None) -> bytes:
    """Return an image as a small JPEG, with a rectangle around a box.

    Raises:
        BadImageError: see `read_image`.
    """
    if box is None:
        return thumbnail(path)
    image = Image.fromarray(read_image(path).permute(1, 2, 0).numpy())
    with decoding(path):
        scale = image.width / upright_size(path)[0]  # below 1 for a very large JPEG
    left, top, right, bottom = (side * scale for side in box[:4])
    line = max(1, round(max(image.size) / 80))  # 2 pixels of the small picture
    for width, color in ((2 * line, "black"), (line, "#ffd33d")):  # visible on light and dark pixels
        ImageDraw.Draw(image).rectangle((left, top, right - 1, bottom - 1), outline=color, width=width)
    return ImageSamples().picture(torch.from_numpy(np.array(image)).permute(2, 0, 1))


def _figure(picture: Picture) -> str:
    name = html(picture.path)
    shown = '<div class="gone">no picture</div>'
    try:
        stored = drawn_picture(picture.path, picture.box) if picture.stored is None else picture.stored
        small = base64.b64encode(stored).decode()
        if small:
            shown = f'<img loading="lazy" alt="{name}" title="{name}" src="data:image/jpeg;base64,{small}">'
    except BadImageError:
        pass
    lines = "".join(f"<span>{html(line)}</span>" for line in picture.lines)
    kind, verdict = {None: ("", ""), True: (' class="right"', "✓ right"), False: (' class="wrong"', "✗ wrong")}[
        picture.is_right
    ]
    lines = f"<span>{verdict}</span>{lines}" if verdict else lines
    return f'<figure{kind}>{shown}<figcaption>{lines}<span class="name">{name}</span></figcaption></figure>'
