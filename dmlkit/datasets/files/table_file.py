"""Reader of table files, with OML's names of columns."""

from pathlib import Path
from typing import Any

from dmlkit.errors import UserError
from dmlkit.files.regular import check_regular

SYNONYMS = {
    "is_query": "query",
    "is_gallery": "gallery",
    "category": "super_class",
    "sequence": "group",
    "x_1": "x1",
    "x_2": "x2",
    "y_1": "y1",
    "y_2": "y2",
}
"""dmlkit's names of the columns of OML's tables."""
BOX = ("x1", "y1", "x2", "y2")
TEXTS = ("path", "label", "split", "query", "gallery", "super_class", "group")


def read_table(file: Path) -> Any:
    """Read a pyarrow table and rename its columns to dmlkit's names.

    Raises:
        UserError: the file is missing, of another kind or damaged, or lacks ``path`` or ``label``.
    """
    import pyarrow as pa
    from pyarrow import csv, parquet

    if file.suffix.lower() not in (".csv", ".parquet"):
        raise UserError(f"dataset.file: {file}: expected a .csv or .parquet file")
    kinds = {column: pa.string() for name in TEXTS for column in (name, *old_names(name))}
    convert = csv.ConvertOptions(column_types=kinds, null_values=[""], strings_can_be_null=True)
    try:
        check_regular(file)
        table: Any = csv.read_csv(file, convert_options=convert) if is_csv(file) else parquet.read_table(file)
    except FileNotFoundError:
        raise UserError(f"dataset.file: {file}: no such file; if it has moved, use --set dataset.file=PATH") from None
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        raise UserError(f"dataset.file: {file}: cannot read this table: {str(error).splitlines()[0]}") from error
    return known_columns(table, f"dataset.file: {file}")


def known_columns(table: Any, where: str) -> Any:
    """Rename the columns of a pyarrow table to dmlkit's names and check them; errors begin with ``where``.

    Raises:
        UserError: the table lacks ``path`` or ``label``, has a column twice, or lacks one of columns that belong
            together.
    """
    try:
        table = table.rename_columns([SYNONYMS.get(name, name) for name in table.column_names])
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: the column names are not UTF-8: {error}; save the table as UTF-8") from None
    columns: list[str] = table.column_names
    faults = [f"has no column {name!r}; it has {', '.join(columns)}" for name in TEXTS[:2] if name not in columns]
    faults += [f"has column {name!r} twice" for name in (*TEXTS, *BOX) if columns.count(name) > 1]
    for together in (("query", "gallery"), BOX):
        given = [name for name in together if name in columns]
        if given and len(given) < len(together):
            faults.append(f"has {' and '.join(given)} without {' and '.join(set(together) - set(given))}")
    if faults:
        raise UserError("\n".join(f"{where} {fault}" for fault in faults))
    for name in TEXTS:
        if name in columns:
            check_texts(table[name], name, where)
    return table


def check_texts(column: Any, name: str, where: str) -> None:
    """Check that the texts of a column are UTF-8, because Parquet may declare any bytes as text.

    Raises:
        UserError: a text is not UTF-8.
    """
    import pyarrow as pa

    try:
        column.validate(full=True)
    except pa.ArrowInvalid as error:
        raise UserError(f"{where}: column {name!r}: {error}; save the texts as UTF-8") from error


def is_csv(file: Path) -> bool:
    """Return whether a table is a CSV file."""
    return file.suffix.lower() == ".csv"


def old_names(name: str) -> list[str]:
    """Return OML's names of a column."""
    return [old for old, new in SYNONYMS.items() if new == name]
