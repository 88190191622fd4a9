"""Folders of images with a table metadata.csv, metadata.jsonl or metadata.parquet, as of Hugging Face."""

import os
from collections.abc import Iterator
from pathlib import Path
from posixpath import normpath, splitext

from dmlkit.errors import UserError, first_line, some_of
from dmlkit.files.csv_table import own_column
from dmlkit.files.readers.base import ImageTable, Reader, counted_out, has_paths, reader_of
from dmlkit.files.regular import EXTENSIONS

METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
VALIDATION = dict.fromkeys(("validation", "valid", "val", "dev"), "validation")
SPLITS = {"train": "train", "test": "test"} | VALIDATION
"""Splits by the usual names of their folders."""
NAME = "file_name"  # column of the paths, relative to the table


class ImageFolderReader(Reader):
    """Reader of the folder, whose splits are folders that each have a table; a single split is none."""

    title = "image folder of Hugging Face"

    def recognizes(self, path: Path) -> bool:
        return path.is_dir() and any(map(has_paths, _tables(path)))

    def read(self, path: Path) -> ImageTable:
        import pyarrow as pa

        parts, places, tables, listed_names = _tables(path), list[str](), list[pa.Table](), set[str]()
        for file in parts:
            reader = reader_of(file)
            assert reader is not None  # by the name of the file
            listed = reader.read(file)
            columns = listed.table.column_names
            index = columns.index(NAME) if NAME in columns else own_column(columns, "path", str(file), "path")
            folder = file.parent.relative_to(path).as_posix()
            names = [name and f"{folder}/{name}".removeprefix("./") for name in listed.table[index].to_pylist()]
            listed_names |= {normpath(name) for name in names if name}
            for column in columns:
                if column.endswith(f"_{NAME}"):  # of masks
                    listed_names |= {normpath(f"{folder}/{name}") for name in listed.table[column].to_pylist()}
            table = listed.table.set_column(index, columns[index], pa.array(names, pa.string()))
            if len(parts) > 1 and "split" not in columns:
                split = pa.array([SPLITS.get(file.parent.name)] * len(table), pa.string())
                table = table.append_column("split", split)
            tables.append(table)
            places += [listed.place(row) for row in range(len(listed))]
        try:
            table = pa.concat_tables(tables, promote_options="permissive")
        except pa.ArrowException as error:
            names = some_of([str(file.relative_to(path)) for file in parts])
            raise UserError(
                f"{path}: the columns of {names} do not fit: {first_line(error)}; expected equal types: save all as CSV"
            ) from error
        known = (file.with_name(name) for file in parts for name in METADATA)
        others = [str(file.relative_to(path)) for file in known if file not in parts and file.is_file()]
        notes = [f"{path}: reads one table in a folder; left out: {some_of(others)}"] if others else []
        images = {*_images_below(path)}
        if images & listed_names:  # otherwise the paths are of another machine, and are changed later
            unlisted = len(images - listed_names)
            notes += counted_out(path, [(unlisted, "image that no table lists", "images that no table lists")])
        return ImageTable(table, path, path, places, notes=notes)


def _images_below(folder: Path) -> Iterator[str]:
    """Yield the paths of image files below a folder, but hidden ones; `Path` takes ten times as long."""
    for directory, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        names = [name for name in files if splitext(name)[1].lower() in EXTENSIONS and not name.startswith(".")]
        below = Path(directory).relative_to(folder).as_posix()
        yield from names if below == "." else (f"{below}/{name}" for name in names)


def _tables(folder: Path) -> list[Path]:
    """Return the tables of a folder, or of its splits."""
    directories = [folder, *(folder / part / name for part in ("", "data") for name in SPLITS)]
    tables = (next(filter(Path.is_file, map(directory.joinpath, METADATA)), None) for directory in directories)
    return [file for file in tables if file is not None]
