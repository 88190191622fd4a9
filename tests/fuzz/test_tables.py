"""Tables of odd columns, cells and bytes: what is listed is what the file says, anything else is told in lines."""

import csv
import io
from collections.abc import Callable, Iterable
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from dmlkit.datasets import TableConfig
from dmlkit.errors import UserError
from dmlkit.files.columns import TEXTS
from dmlkit.files.escape import ESCAPED
from dmlkit.files.labels import label_of
from dmlkit.files.outputs import BOX
from tests.fuzz.conftest import examples

LONGEST = 11_000  # characters of a line: two cells of 5 000, which the command line cuts
ROWS = 6
OTHERS = ("is_query", "is_gallery", "category", "x_1", "y_1", "x_2", "y_2", "sequence", "xmin", "left", "bbox", "Image")
NAMES = (*TEXTS, *TEXTS[:2], *BOX, *OTHERS, "", "path ", "größe", "\x1b[31m")
FITTING: dict[str, st.SearchStrategy[str]] = {
    "label": st.sampled_from(["ant", "bee", "7", "-7", "007"]),
    "split": st.sampled_from(["train", "test", "validation"]),
    **dict.fromkeys(("query", "gallery", "is_query"), st.sampled_from(["true", "False", "1", "0.0"])),
    **dict.fromkeys(("x1", "y1", "x_1"), st.sampled_from(["0", "1.5"])),
    **dict.fromkeys(("x2", "y2", "x_2"), st.sampled_from(["8", "9.5"])),
}
odd = st.text(max_size=6) | st.sampled_from(
    (
        *("", " ", "../a.jpg", "/etc/passwd", "a//b/./c.jpg", "C:\\a.jpg", "nan", "1e999", "-0", str(2**64), "²", "٣"),
        *('"', "=1+1", "[/x]", "\u202e", "a\nb", "a\rb", "a,b", "9" * 5_000, "true"),
    )
)
Columns = list[tuple[str, list[str]]]


@st.composite
def columns(draw: Callable[..., Any]) -> Columns:
    """A few columns, most of them as they should be."""
    names = draw(st.lists(st.sampled_from(NAMES), max_size=4, unique=draw(st.booleans())))
    if draw(st.integers(0, 5)):
        names = [*("path", "label"), *(name for name in names if name not in ("path", "label"))]
    rows, table = draw(st.integers(0, ROWS)), []
    for name in names:
        cells = [f"photos/{row}.jpg" for row in range(rows)]
        if name in FITTING:
            cells = [draw(FITTING[name]) for _ in range(rows)]
        if rows and draw(st.integers(0, 3)) == 0:
            cells[draw(st.integers(0, rows - 1))] = draw(odd)
        table.append((name, cells))
    return table


typed = st.one_of(
    st.lists(st.none() | st.integers(-(2**63), 2**63 - 1), min_size=ROWS, max_size=ROWS),
    st.lists(st.none() | st.floats(), min_size=ROWS, max_size=ROWS),
    st.lists(st.none() | st.booleans(), min_size=ROWS, max_size=ROWS),
    st.lists(st.none() | odd, min_size=ROWS, max_size=ROWS),
    st.lists(st.binary(max_size=4), min_size=ROWS, max_size=ROWS),
    st.sampled_from([[None], [[1]], [{"a": 1}], [date(2020, 1, 1)], [b"\xff"], [1e300]]).map(lambda cell: cell * ROWS),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tables")


def csv_of(table: Columns) -> bytes:
    """A table as the csv module writes it."""
    text = io.StringIO()
    csv.writer(text).writerows([[name for name, _ in table], *zip(*(cells for _, cells in table), strict=True)])
    return text.getvalue().encode()


def labels_of(file: Path) -> list[str] | None:
    """The labels that a table's listing gives, in its order; None where it is refused, or a row is at fault."""
    config = TableConfig(file=str(file))
    try:
        listing = config.listing()
        assert all(0 < len(fault) <= LONGEST for fault in [*listing.faults, *listing.notes])
        dataset = config.build("all")
    except UserError as error:
        assert str(error) and all(len(line) <= LONGEST for line in str(error).split("\n"))
        return None
    assert not listing.faults and len(set(map(dataset.key, range(len(dataset))))) == len(dataset)
    return [dataset.class_names[label] for label in dataset.labels.tolist()]


def meant(cells: Iterable[str | None]) -> list[str]:
    return [label for cell in cells if (label := label_of(cell)) is not None]


def test_a_plain_table_is_listed(folder: Path):
    plain = [("path", ["a.jpg", "b.jpg", "c.jpg"]), ("label", ["ant", "bee", "ant"])]
    (folder / "plain.csv").write_bytes(csv_of(plain))
    assert labels_of(folder / "plain.csv") == ["ant", "bee", "ant"]  # or the tests below could refuse all


@examples(80, 10_000)
@given(table=columns())
def test_a_csv_table_is_listed_as_it_reads_or_refused(table: Columns, folder: Path):
    file = folder / "table.csv"
    file.write_bytes(csv_of(table))
    labels = labels_of(file)
    assert labels is None or labels == meant(ESCAPED.sub(r"\1", cell) for cell in dict(table)["label"])


@examples(80, 10_000)
@given(table=columns(), place=st.floats(0, 1), change=st.binary(max_size=8), cut=st.integers(0, 8))
def test_a_csv_table_of_changed_bytes_is_listed_or_refused(table, place, change, cut, folder):
    data, file = csv_of(table), folder / "changed.csv"
    at = int(place * len(data))
    file.write_bytes(data[:at] + change + data[at + cut :])
    labels_of(file)


@examples(80, 10_000)
@given(
    changed=st.lists(st.tuples(st.sampled_from(NAMES), typed), max_size=3),
    encoded=st.booleans(),
    are_texts=st.booleans(),
)
def test_a_parquet_table_of_any_types_is_listed_or_refused(changed, encoded, are_texts, folder):
    cells: dict[str, Any] = {"path": [f"{row}.jpg" for row in range(ROWS)], "label": list("aabbcc")}
    for name, values in changed:
        column = pa.array(values)
        column = column.view(pa.string()) if are_texts and column.type == pa.binary() else column
        cells[name] = column.dictionary_encode() if encoded and pa.types.is_string(column.type) else column
    file = folder / "table.parquet"
    parquet.write_table(pa.table(cells), file)
    labels = labels_of(file)
    label = cells["label"]
    if labels is not None and (isinstance(label, list) or pa.types.is_string(label.type)):
        assert labels == meant(label if isinstance(label, list) else label.to_pylist())
