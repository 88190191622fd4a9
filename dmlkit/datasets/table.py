"""A table of images: CSV or Parquet with a path and a label a row."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from dmlkit.datasets.base import DatasetConfig
from dmlkit.datasets.files.listing import Listing
from dmlkit.datasets.files.table_file import read_table
from dmlkit.datasets.files.table_rows import TableRows


class TableConfig(DatasetConfig, frozen=True):
    """A CSV or Parquet file with columns ``path`` and ``label``; OML's tables as they are.

    Optional columns: ``split`` (train, validation or test; a table without test rows tests on validation, as OML's
    do), ``query`` and ``gallery`` (true or false), ``super_class``, ``group`` (camera, burst, video), and the box
    ``x1 y1 x2 y2`` in pixels. Without ``split`` the first half of the sorted labels trains, the rest tests. Other
    columns are left alone.
    """

    name: Literal["table"] = "table"
    file: str = Field(min_length=1)
    """The table: .csv or .parquet."""
    root: str | None = None
    """What the paths are relative to; null is the table's own folder."""

    @property
    def data_root(self) -> None:
        return None  # other files beside those of the table are not read

    def listing(self) -> Listing:
        file = Path(self.file)
        return TableRows(read_table(file), file, Path(self.root) if self.root else file.parent).listing()
