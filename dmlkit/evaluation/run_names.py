"""Names of runs for tables: as short as they can be told apart."""

from collections.abc import Sequence
from pathlib import Path

LEFT_OUT = "..."
BETWEEN_WORDS = "/_-. "


def short_names(names: Sequence[str], width: int | None = None) -> list[str]:
    """The ends of paths, as many folders of each as tell all apart; cut where longer than ``width``, see `cut_names`.

    Example:
        >>> short_names(["runs/birds/seed-0", "runs/birds/seed-1"]), short_names(["runs/a/seed-0", "runs/b/seed-0"])
        (['seed-0', 'seed-1'], ['a/seed-0', 'b/seed-0'])
    """
    parts = [Path(name).parts or (name,) for name in names]
    depths = range(1, max(map(len, parts)) + 1)
    ends = ([str(Path(*own[-depth:])) for own in parts] for depth in depths)
    short = next((tails for tails in ends if len(set(tails)) == len(tails)), list(names))
    return short if width is None else cut_names(short, width)


def cut_names(names: Sequence[str], width: int) -> list[str]:
    """Names of at most ``width`` characters, still apart: without the words that all begin with, then without middles.

    Where that cannot be, they stay as they are.

    Example:
        >>> cut_names(["grocery_tuned_mpa", "grocery_tuned_isa"], 12), cut_names(["a" * 20 + "1", "a" * 20 + "2"], 8)
        (['mpa', 'isa'], ['aa...aa1', 'aa...aa2'])
    """
    if max(map(len, names)) <= width:
        return list(names)
    columns = enumerate(zip(*names, strict=False))
    shared = next((place for place, letters in columns if len(set(letters)) > 1), min(map(len, names)))
    words = 1 + max(names[0].rfind(mark, 0, shared) for mark in BETWEEN_WORDS)
    own = [name[words:] for name in names]
    kept = width - len(LEFT_OUT)
    for head in sorted(range(kept + 1), key=lambda head: abs(head - kept // 2)):
        cut = [name if len(name) <= width else _without_middle(name, head, kept - head) for name in own]
        if len(set(cut)) == len(cut) and all(cut):
            return cut
    return list(names)


def _without_middle(name: str, head: int, tail: int) -> str:
    return f"{name[:head]}{LEFT_OUT}{name[len(name) - tail :]}"
