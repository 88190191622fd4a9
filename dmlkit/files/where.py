"""Conditions on the columns of a table: ``--where "side=left and year=2020..2022"``."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from dmlkit.errors import UserError, counted, some_of, warn_once
from dmlkit.files.csv_table import column_called, number_of, own_column
from dmlkit.files.escape import quoted
from dmlkit.files.labels import label_of

FORMS = (
    "expected COLUMN=VALUE, COLUMN in A, B, COLUMN=FROM..TO, COLUMN>=FROM or COLUMN<=TO, joined by and; put a value "
    'with other signs in quotation marks, as in coat="black and white"'
)
AND = r"\s+and(?=\s|$)"
IN = r"\s+in(?=\s)"
SIGNS = re.compile(rf'[=<>",]|\.\.|{AND}|{IN}')  # which stand in values in quotation marks alone
CLOCK = re.compile(r"\d\d?:")
DATE = re.compile(r"\d{4}-\d")
OTHER_SIGNS = re.compile(r"\d{4}([:/.])\d\d?(\1|$)")  # of a date, 2026:05:31 of EXIF
NO_SIGNS = re.compile(r"(\d{4})(0[1-9]|1[0-2])(0[1-9]|[12]\d|3[01])(?!\d)")  # 20260531
YEAR_LAST = re.compile(r"\d\d?(-\d\d?-\d{4}|([./])\d\d?\2\d\d(\d\d)?)(?![./\d])")  # 31-05-2026, 31.05.26, 5/31/26
Cells = Sequence[str | None]
MOST_VALUES = 200  # of a column; more are names of images, not groups of them


class Condition(NamedTuple):
    """A condition on the cells of one column: one of some values, or a range of numbers or of texts such as dates."""

    column: str
    values: frozenset[str | None] | None
    """As `label_of` reads them, so that 3 and 3.0 are equal, and None is an empty cell; None for a range."""
    low: str = ""
    high: str = ""
    """Ends of the range, which belong to it; an empty one is open."""

    def holds(self, cell: str | None, where: str) -> bool:
        """Return whether a cell fulfills it; errors begin with ``where``."""
        if self.values is not None:
            return label_of(cell) in self.values
        if cell is None or not cell.strip():
            return False
        text, low, high = cell.strip(), number_of(self.low or "-inf"), number_of(self.high or "inf")
        number = number_of(text)
        is_date = number is None and DATE.match(_sortable(text)) is not None
        if low is None or high is None or is_date:  # a date, perhaps of a year
            if other := next(filter(YEAR_LAST.match, (text, self.low, self.high)), ""):
                found = f"column {self.column!r}: got {quoted(other)}"
                raise UserError(f"{where}: {found}; ranges of dates need the year first, as in 2026-05-31")
            if is_date and (CLOCK.match(self.low) or CLOCK.match(self.high)):
                raise UserError(f"{where}: column {self.column!r} has {quoted(cell)}; expected a date before the clock")
            text, first, last = map(_sortable, (text, self.low, self.high))
            return text >= first and (not last or text[: len(last)] <= last)
        if number is None:
            raise UserError(f"{where}: column {self.column!r} has {quoted(cell)}; expected numbers")
        return low <= number <= high


class Where(NamedTuple):
    """Conditions that all hold.

    Example:
        >>> sides = {"side": ["left", "right", "left", None], "year": ["2019", "2020", "2021", "2022"]}
        >>> [Where.of(text).rows(sides, "t.csv", 4) for text in ("side=left", "side in left, right and year=2020..")]
        [[0, 2], [1, 2]]
        >>> Where.of('side="left and right"').rows({"side": ["left", "left and right"]}, "t.csv", 2)
        [1]
    """

    text: str
    conditions: tuple[Condition, ...]

    @classmethod
    def of(cls, text: str) -> "Where":
        """Read conditions."""
        rest = _Rest(text.strip())
        conditions = [rest.condition()]
        while rest.take(AND):
            conditions.append(rest.condition())
        return cls(text, tuple(conditions))

    @classmethod
    def of_value(cls, column: str, value: str) -> "Where":
        """Return the condition that a column has a value, as `label_of` reads it."""
        words = [word.replace('"', '""') for word in (column, value)]
        text = "=".join(f'"{word}"' if SIGNS.search(word) else word for word in words)
        return cls(text, (Condition(column, frozenset([value])),))

    @property
    def meaning(self) -> str:
        """A text that conditions share if they differ only in quotation marks, blanks or order.

        Example:
            >>> Where.of('year="2020" and side in b, a').meaning == Where.of("side in a,b and year=2020.0").meaning
            True
        """
        return repr(sorted((name, sorted(map(repr, values or ())), *ends) for name, values, *ends in self.conditions))

    def on(self, columns: Iterable[str], where: str) -> "Where | None":
        """Return the conditions on some columns; None if there are none. Errors begin with ``where``."""
        names = [*columns]
        kept = [one for one in self.conditions if column_called(names, one.column, where) is not None]
        return Where(self.text, tuple(kept)) if kept else None

    def rows(self, columns: Mapping[str, Cells], where: str, count: int) -> list[int]:
        """Return the rows of a table on which all conditions hold."""
        error = f"--where {quoted(self.text)}: {where}"
        rows = list(range(count))
        for condition in self.conditions:
            name = [*columns][own_column([*columns], condition.column, error)]
            cells = columns[name]
            matches = [row for row in rows if condition.holds(cells[row], error)]
            if not matches and rows:
                known = sorted({cells[row] or "no value" for row in rows})
                left = "" if len(rows) == count else f" of the {len(rows):,} rows that fulfill the conditions before"
                raise UserError(f"{error}: no row{left} is left; its column {name!r} has {some_of(known)}")
            rows = matches
        warn_once(f"{where}: {len(rows):,} of {counted(count, 'row')} by --where {quoted(self.text)}")
        return rows


def check_values(names: Sequence[str], column: str) -> None:
    """Raise a `UserError` unless the values of a column, each once, are groups of images: `--by`."""
    if not 2 <= len(names) <= MOST_VALUES:
        reason = f"it has {len(names)} values" if names else "no image has a value"
        reason = f"the only value is {names[0]!r}" if len(names) == 1 else reason
        raise UserError(f"--by {column}: {reason}; expected a column with 2 to {MOST_VALUES} values for these images")


def cells_of(columns: Mapping[str, Any]) -> dict[str, list[str | None]]:
    """Return the columns of a pyarrow table, or lists, as cells of text; columns of lists and bytes are left out."""
    texts = dict[str, list[str | None]]()
    for name, column in columns.items():
        values: list[Any] = column.to_pylist() if hasattr(column, "to_pylist") else column
        first = next((value for value in values if value is not None), None)
        if not isinstance(first, list | dict | bytes):
            texts[name] = [None if value is None or value != value else str(value) for value in values]  # nan too
    return texts


def row_texts(columns: Mapping[str, Cells], count: int) -> list[str | None]:
    """Return the cells of each row as JSON, None for a row without any.

    Example:
        >>> row_texts({"side": ["left", None]}, 2)
        ['{"side": "left"}', None]
    """
    rows = [{name: cells[row] for name, cells in columns.items() if cells[row] is not None} for row in range(count)]
    return [json.dumps(row, ensure_ascii=False) if row else None for row in rows]


def columns_of(rows: Sequence[str | None]) -> dict[str, list[str | None]]:
    """Return the columns that `row_texts` wrote."""
    read = [json.loads(row) if row else {} for row in rows]
    return {name: [row.get(name) for row in read] for name in dict.fromkeys(name for row in read for name in row)}


class _Rest:
    """What is left to read of a text of conditions."""

    def __init__(self, text: str) -> None:
        self.text, self.place = text, 0

    def take(self, sign: str) -> str:
        """Read a sign, a pattern; return it without blanks, empty if it is not next."""
        match = re.compile(rf"\s*({sign})").match(self.text, self.place)
        self.place = match.end() if match else self.place
        return match[1].strip() if match else ""

    def word(self, ends: str) -> str:
        """Read a name or value, in quotation marks or up to one of the signs of a pattern."""
        marked = re.compile(rf'\s*"((?:[^"]|"")*)"\s*(?={ends}|$)').match(self.text, self.place)
        if marked is not None:
            self.place = marked.end()
            return marked[1].replace('""', '"')
        begin, end = self.place, re.compile(ends).search(self.text, self.place)
        self.place = len(self.text) if end is None else end.start()
        return self.text[begin : self.place].strip()

    def condition(self) -> Condition:
        """Read a condition, up to the end or an ``and``."""
        begin, end = self.place, rf"[=<>]|{AND}"
        column, sign = self.word(rf"{end}|{IN}"), self.take(rf"=|>=|<=|{IN}")
        after_sign = self.place
        if sign == "in":
            values = [self.word(rf",|{AND}")]
            while self.take(","):
                values.append(self.word(rf",|{AND}"))
            condition = Condition(column, frozenset(map(label_of, values)))
        elif sign == "=":
            low = self.word(rf"\.\.|{end}")
            is_range = self.take(r"\.\.")
            ends = (low, self.word(end)) if is_range else ()
            condition = Condition(column, None, *ends) if is_range else Condition(column, frozenset([label_of(low)]))
        else:
            value = self.word(end)
            condition = Condition(column, None, *((value, "") if sign == ">=" else ("", value)))
        lists_nothing = sign == "in" and not self.text[after_sign : self.place].strip()
        if not column or not sign or lists_nothing or not re.compile(rf"{AND}|$").match(self.text, self.place):
            part = re.split(AND, self.text[begin:])[0].strip()
            raise UserError(f"--where {quoted(self.text)}: got {quoted(part)}; {FORMS}")
        return condition


@lru_cache(maxsize=10_000)
def _sortable(text: str) -> str:
    """Return a date or a clock in the form whose texts are in the order of time; other texts stay as they are.

    Example:
        >>> _sortable("2021-3-05T9:30"), _sortable("9:30:00.5"), _sortable("T9")
        ('2021-03-05 09:30', '09:30:00.5', 'T9')
        >>> _sortable("2021:03:05 09:30"), _sortable("20210305")
        ('2021-03-05 09:30', '2021-03-05')
    """
    if signs := OTHER_SIGNS.match(text):
        text = text.replace(signs[1], "-", 2)
    elif date := NO_SIGNS.match(text):
        text = "-".join(date.groups()) + text[date.end() :]
    is_time = re.match(r"\d{4}-\d|\d\d?:\d", text)
    return re.sub(r"(?<![\d.,])(\d)(?!\d)", r"0\1", text.replace("T", " ")) if is_time else text
