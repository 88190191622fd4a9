"""The interface of file formats of embeddings, and the export in a format by its name."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from dmlkit.errors import UserError
from dmlkit.export.wanted import EmbeddingFormat, IndexPrecision
from dmlkit.files.outputs import check_file, writing
from dmlkit.vectors.folder import EmbeddingFolder

FORMATS: dict[str, "Format"] = {}
"""Formats by name; every subclass of `Format` is registered."""


class Format(ABC):
    """A file format of embeddings. A subclass is one file of `dmlkit.export.formats`.

    Its ``name`` is that of ``dmlkit export --format``, and ``file_name`` the output in a folder of embeddings.
    """

    name: ClassVar[str]
    file_name: ClassVar[str]

    def __init_subclass__(cls, name: str, file_name: str) -> None:
        cls.name, cls.file_name = name, file_name
        FORMATS[name] = cls()

    def at(self, precision: IndexPrecision) -> "Format":
        """Return the format with vectors of a precision; most formats have float32 alone."""
        if precision != "fp32":
            raise UserError(f"export: --precision {precision} does not apply to --format {self.name}; use faiss")
        return self

    @abstractmethod
    def write(self, folder: EmbeddingFolder, output: Path) -> list[Path]:
        """Write embeddings with their ids, paths and labels, atomically, and return the files of `files`."""

    def files(self, output: Path) -> list[Path]:
        """Return the files that `write` writes."""
        return [output]

    def check(self, output: Path, data: Sequence[Path]) -> None:
        """Check that an output may be written, see `check_file`."""
        for path in self.files(output):
            check_file(path, sources=data)


def export_embeddings(
    folder: EmbeddingFolder,
    format: EmbeddingFormat,  # noqa: A002
    output: Path,
    precision: IndexPrecision = "fp32",
) -> list[Path]:
    """Write embeddings with their ids, paths and labels, and return the files.

    Args:
        format: ``faiss`` (exact inner-product index, with its items next to it), ``parquet`` (a fixed-size-list
            column), ``npz``, or ``tensorboard`` (a folder for the embedding projector).
        output: the file to write, or the folder for tensorboard.
        precision: of the vectors of a ``faiss`` index, see `dmlkit.export.formats.faiss.Faiss`.
    """
    writer = FORMATS[format].at(precision)
    folder.check_points()  # nothing is written if a point is invalid
    with writing(output):
        return writer.write(folder, output)
