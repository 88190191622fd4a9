"""Images that are answered together, for example those of a track, a burst or an encounter."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from dmlkit.datasets.files.table_file import read_images_table, text_column
from dmlkit.embedding.images import FOLDER, TABLES
from dmlkit.embedding.points import PointSet, PointsInMemory
from dmlkit.embedding.questions.answers import Answers
from dmlkit.embedding.questions.decisions import Decider
from dmlkit.embedding.questions.rules import Decision
from dmlkit.embedding.questions.search import QUERY_ROWS
from dmlkit.errors import UserError


def group_rows(images: Path, asked: PointSet, by: str, known: Sequence[str | None]) -> dict[str, list[int]]:
    """Return the rows of each group of images, in the order in which the groups come first.

    Args:
        images: where the images are from.
        asked: their points.
        by: see `group_names`.
        known: (N,) the correct label of each image, None where it is not known.

    Raises:
        UserError: images of a group have two labels, or see `group_names`.
    """
    groups: dict[str, list[int]] = {}
    for row, name in enumerate(group_names(images, asked, by)):
        groups.setdefault(name, []).append(row)
    for name, rows in groups.items():
        given = sorted({label for row in rows if (label := known[row]) is not None})
        if len(given) > 1:
            raise UserError(
                f"--by-group {by}: the group {name} has images of {given[0]!r} and of {given[1]!r}; expected images of "
                "one label in each group"
            )
    return groups


def group_names(images: Path, asked: PointSet, by: str) -> list[str]:
    """Return the name of each image's group.

    Args:
        images: where the images are from.
        asked: their points.
        by: ``folder``: the folder of an image is its group; else a column of a table of images, in which a blank cell
            makes an image a group of its own.

    Raises:
        UserError: the images are not from a table, or it does not have the column.
    """
    if by == FOLDER:
        return [str(Path(path).parent) for path in asked.paths]
    if images.suffix.lower() not in TABLES or not isinstance(asked, PointsInMemory) or asked.rows is None:
        raise UserError(f"--by-group {by}: {images} is no table and has no columns; use {FOLDER}")
    column = text_column(read_images_table(images, by), str(images), "label").to_pylist()
    cells = [column[row] for row in asked.rows.tolist()]
    return [cell or path for cell, path in zip(cells, asked.paths, strict=True)]


def decide_groups(decider: Decider, asked: PointSet, groups: Sequence[Sequence[int]]) -> list[Decision]:
    """Decide on groups of images, those with equally many at once.

    Args:
        decider: labeled points.
        asked: points of the images.
        groups: rows of the images of each group.
    """
    found: dict[int, Decision] = {}
    for size in {len(rows) for rows in groups}:
        places = torch.tensor([place for place, rows in enumerate(groups) if len(rows) == size])
        for part in places.split(max(1, QUERY_ROWS // size)):
            rows = torch.tensor([groups[place] for place in part.tolist()])
            points = asked.points_at(rows.flatten()).reshape(*rows.shape, -1)
            found.update(zip(part.tolist(), decider.decide(points[:, 0] if size == 1 else points), strict=True))
    return [found[place] for place in range(len(groups))]


def neighbors_of_groups(near: Answers, groups: dict[str, list[int]]) -> Answers:
    """Return the nearest pictures of each group: those that are the most similar to any of its images.

    Args:
        near: neighbors of each image.
        groups: rows of the images of each group, by its name.
    """
    similarities, found = torch.empty(len(groups), near.k), torch.empty(len(groups), near.k, dtype=torch.int64)
    for place, rows in enumerate(groups.values()):
        ranked = near.similarities[rows].flatten().sort(descending=True, stable=True)
        pictures = near.rows[rows].flatten()[ranked.indices]
        best = dict[int, float]()
        for picture, similarity in zip(pictures.tolist(), ranked.values.tolist(), strict=True):
            best.setdefault(picture, similarity)
        found[place] = torch.tensor(list(best)[: near.k])
        similarities[place] = torch.tensor(list(best.values())[: near.k])
    first = [near.pictures[rows[0]] for rows in groups.values()]
    named = {"queries": list(groups), "pictures": first, "boxes": [None] * len(groups)}
    return replace(near, **named, similarities=similarities, rows=found)
