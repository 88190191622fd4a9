"""Groups of images that get one answer, e.g. of a track or burst: ``dmlkit identify --by``."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from dmlkit.datasets.files.boxes import Boxes
from dmlkit.errors import UserError
from dmlkit.files.csv_table import own_column
from dmlkit.files.image_table import LABEL, text_column
from dmlkit.identify.answers import Answers, Decision
from dmlkit.identify.decisions import Decider
from dmlkit.nearest.search import QUERY_ROWS
from dmlkit.vectors.images import FOLDER, NONE, query_table
from dmlkit.vectors.points import PointSet


def group_rows(
    images: Path, asked: PointSet, by: str, known: Sequence[str | None], boxes: Boxes | None = None
) -> dict[str, list[int]]:
    """Return the rows of each group of images, in the order in which the groups come first; see `_group_names`."""
    groups: dict[str, list[int]] = {}
    for row, name in enumerate(_group_names(images, asked, by, boxes)):
        groups.setdefault(name, []).append(row)
    for name, rows in groups.items():
        given = sorted({label for row in rows if (label := known[row]) is not None})
        if len(given) > 1:
            raise UserError(
                f"--by {by}: the group {name} has images of {given[0]!r} and of {given[1]!r}; expected images of "
                "one label in each group"
            )
    return groups


def _group_names(images: Path, asked: PointSet, by: str, boxes: Boxes | None) -> list[str]:
    """Return the name of each image's group.

    With ``folder`` it is the folder of the image; else its cell in a column of a table of images, in which a blank one
    makes an image a group of its own.
    """
    is_array = asked.manifest is None
    if by == FOLDER and not is_array:
        return [str(Path(path).parent) for path in asked.paths]
    table = None if is_array else query_table(images, boxes, None if by == LABEL else NONE)
    if table is None or asked.images is None:
        if is_array:
            raise UserError(f"--by {by}: the rows of {images} have no folders or columns; remove this option")
        raise UserError(f"--by {by}: {images} is no table and has no columns; use {FOLDER}")
    names = table.table.column_names
    column = text_column(table.table, str(images), names[own_column(names, by, str(images))]).to_pylist()
    cells = [column[row] for row in asked.images.rows.tolist()]
    return [cell or path for cell, path in zip(cells, asked.paths, strict=True)]


def decide_groups(
    decider: Decider, asked: PointSet, groups: Sequence[Sequence[int]], numbers: Tensor | None
) -> list[Decision]:
    """Decide on groups of images, given by their rows, those with equally many at once."""
    decided: dict[int, Decision] = {}
    for size in {len(rows) for rows in groups}:
        places = torch.tensor([place for place, rows in enumerate(groups) if len(rows) == size])
        for part in places.split(max(1, QUERY_ROWS // size)):
            rows = torch.tensor([groups[place] for place in part.tolist()])
            rows = rows[:, 0] if size == 1 else rows
            points = asked.points_at(rows.flatten()).reshape(*rows.shape, -1)
            decisions = decider.decide(points, numbers=None if numbers is None else numbers[rows])
            decided.update(zip(part.tolist(), decisions, strict=True))
    return [decided[place] for place in range(len(groups))]


def neighbors_of_groups(near: Answers, groups: dict[str, list[int]]) -> Answers:
    """Return the nearest pictures of each group: those that are the most similar to any of its images."""
    similarities, nearest = torch.empty(len(groups), near.k), torch.empty(len(groups), near.k, dtype=torch.int64)
    for place, rows in enumerate(groups.values()):
        ranked = near.similarities[rows].flatten().sort(descending=True, stable=True)
        pictures = near.rows[rows].flatten()[ranked.indices]
        best = dict[int, float]()
        for picture, similarity in zip(pictures.tolist(), ranked.values.tolist(), strict=True):
            best.setdefault(picture, similarity)
        nearest[place] = torch.tensor(list(best)[: near.k])
        similarities[place] = torch.tensor(list(best.values())[: near.k])
    first = [near.pictures[rows[0]] for rows in groups.values()]
    named = {"queries": list(groups), "pictures": first, "boxes": [None] * len(groups)}
    return replace(near, **named, similarities=similarities, rows=nearest)
