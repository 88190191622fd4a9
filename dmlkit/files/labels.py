"""Labels as people write them: the one rule for which texts are the same label, and which are none."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from unicodedata import normalize

from dmlkit.errors import UserError, counted, some_of
from dmlkit.files.escape import quoted

MISSING = ("na", "n/a", "nan", "none", "null")
"""What other programs write for an empty cell, in lower case: labels as any others, since NA may be Namibia."""
UNKNOWN = "unknown"
"""The answer to an image of no known label; as a label, in any case, it means that there is none."""
WHOLE_NUMBER = re.compile(r"(-?[0-9]+)\.0+")


def label_of(text: str | None) -> str | None:
    """Return the label that a text means: the one rule for datasets, galleries, answers and reviews.

    Blanks at the ends are removed, Unicode is composed (NFC), and a whole number loses its decimals. None, an empty
    text and ``unknown``, in any case, are no label.

    Example:
        >>> [label_of(text) for text in (" c00 ", "3.0", "007", "3.1", "Crow", "crow", "", "Unknown")]
        ['c00', '3', '007', '3.1', 'Crow', 'crow', None, None]
    """
    label = normalize("NFC", text or "").strip()
    if number := WHOLE_NUMBER.fullmatch(label):
        return number[1]
    return None if label.casefold() in ("", UNKNOWN) else label


def path_label(parts: Sequence[str]) -> str | None:
    """Return the label that a path means, of which each part is a label; None if one of them is none.

    Example:
        >>> path_label(["corvus", "corax "]), path_label(["corvus", "unknown"]), path_label([])
        ('corvus/corax', None, None)
    """
    labels = [label for part in parts if (label := label_of(part)) is not None]
    return "/".join(labels) if labels and len(labels) == len(parts) else None


def stated_label(text: str, where: str) -> str:
    """Return the label that a person states in an option, an answer or a request; errors begin with ``where``."""
    label = label_of(text)
    if label is None or any("\ud800" <= character <= "\udfff" for character in label):
        raise UserError(f"{where}: {quoted(text)} is no label; expected UTF-8 text other than {UNKNOWN!r}")
    return label


def label_notes(counts: Mapping[str, int], where: str, read: Callable[[str], str | None] = label_of) -> list[str]:
    """Return a line on labels that are read in another spelling, on images without one, and on letters' case.

    ``counts`` are the numbers of images by the text of their label; ``read`` returns the label that a text means.

    Example:
        >>> print("\\n".join(label_notes({"c00": 2, "c00 ": 1, "Crow": 1, "crow": 3, "": 4}, "t.csv")))
        t.csv: 1 image has a label in another spelling: 'c00 ' as 'c00'
        t.csv: 4 images have no label (empty or 'unknown'), to be left out of all losses and metrics
        t.csv: labels that differ only in upper and lower case are different labels: 'Crow' (1) and 'crow' (3)
    """
    meant = {text: read(text) for text in counts}
    changed = {text: label for text, label in meant.items() if label not in (None, text)}
    notes: list[str] = []
    if changed:
        have = counted(sum(counts[text] for text in changed), "image has", "images have")
        composed = {text for text in changed if normalize("NFC", text) != text}  # both spellings look the same
        pairs = [
            f"{text!a} as {label!a}" if text in composed else f"{text!r} as {label!r}"
            for text, label in sorted(changed.items())
        ]
        notes.append(f"{where}: {have} a label in another spelling: {some_of(pairs)}")
    nameless = sum(count for text, count in counts.items() if meant[text] is None)
    if 0 < nameless < sum(counts.values()):
        have = counted(nameless, "image has", "images have")
        notes.append(f"{where}: {have} no label (empty or {UNKNOWN!r}), to be left out of all losses and metrics")
    totals: dict[str, Counter[str]] = defaultdict(Counter)
    for text, label in meant.items():
        if label is not None:
            totals[label.casefold()][label] += counts[text]
    missing = [f"{label!r} ({count:,})" for key in MISSING for label, count in totals[key].items()]
    if missing:
        notes.append(f"{where}: read as classes: {some_of(missing)}; write {UNKNOWN!r} for images without a label")
    alike = [sorted(spelled.items()) for spelled in totals.values() if len(spelled) > 1]
    if alike:
        groups = [" and ".join(f"{label!r} ({count:,})" for label, count in spelled) for spelled in alike]
        differ = "labels that differ only in upper and lower case are different labels"
        notes.append(f"{where}: {differ}: {some_of(groups)}")
    return notes
