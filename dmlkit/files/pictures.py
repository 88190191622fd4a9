"""Pictures: one size and style, readable in a column of a paper, written atomically, and short names for their text."""

import warnings
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dmlkit.files.atomic import atomic_write
from dmlkit.files.escape import printable
from dmlkit.files.outputs import writing

PICTURES = (".png", ".svg", ".pdf")
COLUMN = 80.0  # mm, the width of a column
MM = 1 / 25.4  # inches
LOOK: dict[Any, Any] = {
    "font.size": 7,  # points: what papers print below their figures
    "axes.titlesize": 7,
    "axes.labelsize": 7,
    "xtick.labelsize": 6,
    "ytick.labelsize": 6,
    "legend.fontsize": 6,
    "axes.linewidth": 0.6,
    "lines.linewidth": 1.1,
    "lines.markersize": 3,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "hatch.linewidth": 0.5,
    "text.parse_math": False,  # a $ in a name is a $
}
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Colors of lines that color-blind readers can distinguish (Okabe & Ito 2008). Lines also differ by more than color."""
DASHES = ("-", "--", "-.", ":")
JOINED = 8  # pairs of patches of two images that lines join; more of them hide the images


@contextmanager
def picture(path: Path, height: float, columns: int = 1) -> Generator[Any]:
    """Yield a matplotlib figure to draw in; it is written atomically when the block ends.

    Its height is in millimeters, its width in columns of a paper; the file's name ends in one of `PICTURES`.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(LOOK), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # one per character; the picture shows boxes
        figure = Figure(figsize=(COLUMN * MM * columns, height * MM), layout="constrained")
        yield figure
        with writing(path), atomic_write(path) as partial:
            figure.savefig(partial, dpi=300, format=path.suffix[1:].lower())


def shortened(name: str, most: int) -> str:
    """Shorten a name: make it printable and cut its middle, because names differ at either end.

    Example:
        >>> shortened("dove", 8), shortened("Golden-Delicious-Apple", 11)
        ('dove', 'Golde…Apple')
    """
    name = printable(name)
    if len(name) <= most:
        return name
    end = (most - 1) // 2
    return f"{name[: most - 1 - end]}…{name[len(name) - end :]}"


def shortened_apart(names: Sequence[str], most: int) -> list[str]:
    """Shorten names; those that would look the same start where they differ.

    Example:
        >>> shortened_apart(["Juice-of-Apples-1l", "Juice-of-Oranges-1l", "Milk"], 9)
        ['…Apples-1l', '…Oran…s-1l', 'Milk']
    """
    short = [shortened(name, most) for name in names]
    for text in {text for text in short if short.count(text) > 1}:
        same = [index for index, other in enumerate(short) if other == text]
        letters = zip(*(names[index] for index in same), strict=False)
        shared = next((position for position, here in enumerate(letters) if len(set(here)) > 1), 0)
        for index in same:
            short[index] = f"…{shortened(names[index][shared:], most)}"
    return short


def distinct_tails(paths: Sequence[Path]) -> list[str]:
    """Return the shortest ends of paths that distinguish them.

    Example:
        >>> distinct_tails([Path("runs/a/seed-0"), Path("runs/b/seed-0"), Path("runs/c")])
        ['a/seed-0', 'b/seed-0', 'c']
    """
    parts = [path.resolve().parts for path in paths]
    tails = list[str]()
    for own in parts:
        lengths = (size for size in range(1, len(own)) if sum(other[-size:] == own[-size:] for other in parts) == 1)
        tails.append("/".join(own[-next(lengths, len(own)) :]))
    return tails
