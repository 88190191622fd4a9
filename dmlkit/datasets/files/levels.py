"""Hierarchies of classes: class names that are paths such as ``corvus/corax``, and the class of each level."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from dmlkit.errors import UserError

Levels = Mapping[str, Tensor]
"""Levels of C classes by name, coarsest first: the class that each of them has at that level, (C,) int64. At the last
level these are the classes themselves, 0..C-1."""


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
    counted = f"{len(parts)} level{'s' if len(parts) > 1 else ''}"
    return f"the class {name!r} has {counted}, expected {len(levels)}: {'/'.join(levels)}"


def path_levels(names: Sequence[str], levels: Sequence[str]) -> Levels:
    """Return the levels of classes whose names are paths.

    Args:
        names: C unique paths, each with one part per level.
        levels: names of the levels, coarsest first.

    Raises:
        UserError: a path has fewer or more parts than there are levels, or an empty part.

    Example:
        >>> path_levels(["corvus/corax", "pica/pica", "corvus/corone"], ["genus", "species"])
        {'genus': tensor([0, 1, 0]), 'species': tensor([0, 1, 2])}
    """
    for name in names:
        if fault := path_fault(name, levels):
            raise UserError(f"{fault}; rename it or change the levels")
    found: dict[str, Tensor] = {}
    for depth, level in enumerate(levels[:-1], start=1):
        prefixes = ["/".join(name.split("/")[:depth]) for name in names]
        found[level] = torch.from_numpy(np.unique(prefixes, return_inverse=True)[1])
    return found | {levels[-1]: torch.arange(len(names))}


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
