"""Columns of a table in Arrow."""

from typing import Any

import numpy as np

from dmlkit.errors import UserError


class ArrowNames:
    """The strings of an Arrow column, made when they are asked for: 60 bytes each instead of 150.

    Args:
        column: a pyarrow array of strings.
    """

    def __init__(self, column: Any) -> None:
        self.column = column

    def __len__(self) -> int:
        return len(self.column)

    def __getitem__(self, index: int) -> str:
        return self.column[index].as_py()


def text_column(table: Any, where: str, name: str) -> Any:
    """A column of a pyarrow table as one array of strings; ``where`` is named in errors.

    Raises:
        UserError: it holds neither text nor numbers.
    """
    import pyarrow as pa

    try:
        column = table[name].cast(pa.string())
    except pa.ArrowException as error:
        kind, reason = table.schema.field(name).type, str(error).splitlines()[0]
        raise UserError(f"{where}: column {name!r} is of type {kind} ({reason}); expected text or numbers") from error
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def group_numbers(table: Any, where: str) -> np.ndarray | None:
    """The column ``group`` as (N,) int64, equal within a group; a row without one has a number of its own."""
    if "group" not in table.column_names:
        return None
    encoded = text_column(table, where, "group").dictionary_encode()
    numbers = encoded.indices.fill_null(-1).to_numpy()
    alone = len(encoded.dictionary) + np.arange(len(numbers))
    return np.where(numbers < 0, alone, numbers).astype(np.int64)


def arrow_compute() -> Any:
    """pyarrow.compute, whose functions are made at run time: their types are unknown."""
    from pyarrow import compute

    return compute


def rows_where(mask: Any) -> np.ndarray:
    """The rows at which an Arrow mask is true."""
    return mask.to_numpy(zero_copy_only=False).nonzero()[0]
