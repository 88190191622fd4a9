"""Names of classes: those of a run, paths such as ``corvus/corax`` of a hierarchy, and sets of labels."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dmlkit.errors import UserError, counted
from dmlkit.files.labels import label_of, path_label

Levels = Mapping[str, Tensor]
"""Levels of C classes by name, coarsest first: the class that each of them has at that level, (C,) int64. At the last
level these are the classes themselves, 0..C-1."""


def label_in(text: str | None, levels: Sequence[str] = (), separator: str | None = None) -> str | None:
    """Return the label in a cell, see `label_of`, of which each part of a path and each label of a set is one.

    A path with a part that is no label is none; a set loses such members. Empty parts remain, for `path_fault` and
    `label_set` to report.

    Example:
        >>> label_in("corvus/unknown", ["genus", "species"]), label_in("b |unknown", separator="|")
        (None, 'b')
    """
    divider = separator or ("/" if levels else None)
    if text is None or divider is None or divider not in text:
        return label_of(text)
    parts = text.split(divider)
    if not all(part.strip() for part in parts):
        return text.strip()
    if separator is None:
        return path_label(parts)
    return separator.join(label for part in parts if (label := label_of(part)) is not None) or None


class SplitClasses(NamedTuple):
    """Names of the classes of each split of a run, to which its commands keep when its data gain or lose classes."""

    run: str  # path of the run
    names: Mapping[str, Sequence[str]]  # names by split; none for a split that the run does not have
    reference: str = ""  # the run whose test classes stand for a model of every class, as a clause of an error
    images: Mapping[str, Sequence[str]] | None = None
    """Names of the images of each split, see `Listing.keys`; None unless test images are of known classes."""

    def require(self, split: str) -> None:
        """Raise a `UserError` unless the run has classes of a split."""
        if self.names[split]:
            return
        why = f"without {split} classes; train with dataset.validation_fraction above 0"
        if not self.names["test"]:
            why = f"on every class of its dataset, so it has no {split} classes{self.reference}"
        raise UserError(f"{self.run}: was trained {why}")


def path_fault(name: str, levels: Sequence[str]) -> str | None:
    """Return what is wrong with a class name as a path with one part per level, or None.

    Example:
        >>> path_fault("corvus", ["genus", "species"])
        "the class 'corvus' has 1 level, expected 2: genus/species"
        >>> path_fault("corvus/corax", ["genus", "species"])
    """
    parts = name.split("/")
    if not all(part.strip() for part in parts):
        return f"the class {name!r} has an empty level, expected {'/'.join(levels)}"
    if len(parts) == len(levels):
        return None
    depth = counted(len(parts), "level", "levels")
    return f"the class {name!r} has {depth}, expected {len(levels)}: {'/'.join(levels)}"


def path_levels(names: Sequence[str], levels: Sequence[str]) -> Levels:
    """Return the levels of classes whose C unique names are paths with one part per level, coarsest first.

    Example:
        >>> path_levels(["corvus/corax", "pica/pica", "corvus/corone"], ["genus", "species"])
        {'genus': tensor([0, 1, 0]), 'species': tensor([0, 1, 2])}
    """
    for name in names:
        if fault := path_fault(name, levels):
            raise UserError(f"{fault}; rename it or change the levels")
    coarser: dict[str, Tensor] = {}
    for depth, level in enumerate(levels[:-1], start=1):
        prefixes = ["/".join(name.split("/")[:depth]) for name in names]
        coarser[level] = torch.from_numpy(np.unique(prefixes, return_inverse=True)[1])
    return coarser | {levels[-1]: torch.arange(len(names))}


def levels_of(levels: Levels, classes: Sequence[int]) -> Levels:
    """Return the levels of some of the classes, which are then numbered 0..C'-1.

    Example:
        >>> levels_of(path_levels(["a/x", "a/y", "b/z"], ["genus", "species"]), [2, 0])
        {'genus': tensor([1, 0]), 'species': tensor([0, 1])}
    """
    if not levels:
        return {}
    *coarser, finest = levels
    return {name: levels[name][list(classes)] for name in coarser} | {finest: torch.arange(len(classes))}


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
    labels = sorted({label for parts in sets for label in parts})
    index_of = {label: index for index, label in enumerate(labels)}
    members = np.zeros((len(sets), len(labels)), dtype=bool)
    for row, parts in enumerate(sets):
        members[row, [index_of[label] for label in parts]] = True
    return labels, members


def sharing_labels(names: Sequence[str], known: Collection[str], separator: str | None) -> list[str]:
    """Return which classes have a label of known classes; without a separator, each is a label itself.

    Example:
        >>> sharing_labels(["a|c", "d|e"], ["a|b"], "|"), sharing_labels(["a|c", "d"], ["a|b", "d"], None)
        (['a|c'], ['d'])
    """
    sets = {name: {name} if separator is None else {*name.split(separator)} for name in {*names, *known}}
    labels = set[str]().union(*(sets[name] for name in known))
    return [name for name in names if not labels.isdisjoint(sets[name])]


def in_groups(names: Sequence[str], separator: str) -> list[str]:
    """Return the names of sets sorted so that sets connected by common labels follow each other.

    Example:
        >>> in_groups(["c|z", "a|b", "x", "c", "b|y"], "|")
        ['a|b', 'b|y', 'c', 'c|z', 'x']
    """
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import connected_components

    if not names:
        return []
    sets: Any = csr_array(members_of(names, separator)[1]).astype(np.int32)
    groups = connected_components(sets.T @ sets)[1][sets.indices[sets.indptr[:-1]]]  # in the order of their first label
    return [name for _, name in sorted(zip(groups.tolist(), names, strict=True))]


def cut_between_groups(names: Sequence[str], separator: str, place: int, ends: tuple[int, int]) -> int | None:
    """Return the position nearest to ``place`` at which sets, sorted by `in_groups`, are cut without dividing a label.

    A position is the number of sets before the cut, from ``ends[0]`` to ``ends[1]``. The smaller of two is returned,
    and None if each cut divides a label.

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
