"""Sets of labels: images with several labels each, whose class is the set, and which sets have a label in common."""

from collections.abc import Sequence

import numpy as np


def label_set(text: str, separator: str) -> tuple[str, str | None]:
    """Return the set of labels in a text, sorted, as its class is named, and what is wrong with it, or None.

    Example:
        >>> label_set("b|a", "|"), label_set("a||b", "|")[1]
        (('a|b', None), "the label 'a||b' has an empty label; expected labels separated by '|'")
    """
    labels = text.split(separator)
    if not all(label.strip() for label in labels):
        return text, f"the label {text!r} has an empty label; expected labels separated by {separator!r}"
    if len(set(labels)) < len(labels):
        return text, f"the label {text!r} has a label twice; list each once"
    return separator.join(sorted(labels)), None


def several_labels(what: str, separator: str) -> str:
    """Return the error of something that needs one label per image, and got images with several."""
    return (
        f"{what}: needs one label per image, but images have several (dataset.separator {separator!r}), which only "
        "train, eval RUN, cluster and align support; use a table with one label per image"
    )


def members_of(names: Sequence[str], separator: str) -> tuple[list[str], np.ndarray]:
    """Return the L labels of C sets, sorted, and which of them each set has, (C, L) bool.

    Example:
        >>> members_of(["a|c", "b"], "|")[1].tolist()
        [[True, False, True], [False, True, False]]
    """
    sets = [name.split(separator) for name in names]
    labels = sorted({label for one in sets for label in one})
    place = {label: index for index, label in enumerate(labels)}
    members = np.zeros((len(sets), len(labels)), dtype=bool)
    members[[row for row, one in enumerate(sets) for _ in one], [place[label] for one in sets for label in one]] = True
    return labels, members


def in_groups(names: Sequence[str], separator: str) -> list[str]:
    """Return the names of sets sorted so that sets connected by common labels follow each other.

    Example:
        >>> in_groups(["c|z", "a|b", "x", "c", "b|y"], "|")
        ['a|b', 'b|y', 'c', 'c|z', 'x']
    """
    parent: dict[str, str] = {}

    def root(label: str) -> str:
        while parent.setdefault(label, label) != label:
            parent[label] = label = parent[parent[label]]
        return label

    for name in names:
        first, *others = name.split(separator)
        for other in others:
            one, two = sorted((root(first), root(other)))
            parent[two] = one  # the root of a group is its first label
    return sorted(names, key=lambda name: (root(name.partition(separator)[0]), name))


def cut_between_groups(names: Sequence[str], separator: str, place: int, ends: tuple[int, int]) -> int | None:
    """Return the position nearest to ``place`` at which sorted sets can be cut without dividing a label.

    Args:
        names: C sets in the order of `in_groups`.
        separator: separator of the labels of a set.
        place: position, the number of sets before the cut.
        ends: smallest and largest position.

    Returns:
        The position; the smaller of two, and None if each cut divides a label.

    Example:
        >>> cut_between_groups(["a|b", "b|y", "c", "x"], "|", 1, (1, 3))
        2
    """
    _, members = members_of(names, separator)
    first, last = members.argmax(0), len(names) - 1 - members[::-1].argmax(0)  # (L,)
    bounds = np.zeros(len(names) + 1, dtype=np.int64)
    np.add.at(bounds, first + 1, 1)
    np.add.at(bounds, last + 1, -1)
    whole = (bounds.cumsum() == 0).nonzero()[0]
    whole = whole[(whole >= ends[0]) & (whole <= ends[1])]
    return int(whole[np.abs(whole - place).argmin()]) if len(whole) else None
