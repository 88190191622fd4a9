"""Dataset of a table of images, CSV or Parquet, with a path and a label per row."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from dmlkit.datasets.base import DatasetConfig
from dmlkit.datasets.files.listing import Listing
from dmlkit.datasets.files.table_file import read_table
from dmlkit.datasets.files.table_rows import TableRows
from dmlkit.errors import option_errors


class TableConfig(DatasetConfig, frozen=True):
    """CSV or Parquet file with columns ``path`` and ``label``; OML's tables are supported.

    Optional columns: ``split`` (train, validation or test; without test rows, the validation rows are used for testing,
    as in OML), ``query`` and ``gallery`` (true or false), ``super_class``, ``group`` (camera, burst, video), and the
    box ``x1 y1 x2 y2`` in pixels. Without ``split``, the first half of the sorted labels is for training, the rest for
    testing. Training ignores other columns; ``dmlkit eval --by`` reads them.
    """

    name: Literal["table"] = "table"
    file: str = Field(min_length=1)
    """Path of the table, .csv or .parquet."""
    root: str | None = None
    """Folder that the paths in the table are relative to; null is the table's own folder."""

    @property
    def data_root(self) -> None:
        return None  # files that the table does not name are not read

    def listing(self) -> Listing:
        file = Path(self.file)
        with option_errors("dataset.file"):
            return TableRows(read_table(file), file, Path(self.root) if self.root else file.parent).listing()
