"""Neighbours as a CSV table."""

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path

from dmlkit.embedding.questions.answers import Answers
from dmlkit.files.atomic import atomic_write
from dmlkit.files.escape import spreadsheet
from dmlkit.files.outputs import check_output, head_of, writing

NEIGHBOR_COLUMNS = ("query", "rank", "similarity", "id", "label", "path")


def write_neighbors(answers: Answers, path: Path) -> None:
    """One row a query and neighbour."""
    rows = (
        (query, rank, f"{similarity:.9g}", item.id, item.label or "", item.path)
        for query, neighbors in answers.neighbors()
        for rank, similarity, item in neighbors
    )
    write_table(path, NEIGHBOR_COLUMNS, rows)


def write_table(path: Path, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Write a CSV table, all or nothing; a text that a spreadsheet would compute gets an apostrophe.

    Raises:
        UserError: it cannot be written.
    """
    with writing(path), atomic_write(path) as partial, partial.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows([spreadsheet(str(cell)) for cell in row] for row in rows)


def check_table(path: Path, columns: Sequence[str], *, option: str) -> None:
    """Make sure that a CSV table may be written.

    Raises:
        UserError: there is no such folder, or something else is there.
    """
    header = ",".join(columns).encode()
    check_output(path, lambda file: head_of(file).split(b"\r\n")[0] == header, option=option)
