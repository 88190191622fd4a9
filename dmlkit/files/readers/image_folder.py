"""Folders of images with a table metadata.csv, metadata.jsonl or metadata.parquet, as of Hugging Face."""

from pathlib import Path

from dmlkit.errors import UserError, first_line, some_of
from dmlkit.files.csv_table import own_column
from dmlkit.files.readers.base import ImageTable, Reader, counted_out, has_paths, reader_of, unlisted

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

        from dmlkit.files.image_file import image_files

        parts, places, tables, paths = _tables(path), list[str](), list[pa.Table](), list[str]()
        for file in parts:
            reader = reader_of(file)
            assert reader is not None  # by the name of the file
            listed = reader.read(file)
            columns = listed.table.column_names
            index = columns.index(NAME) if NAME in columns else own_column(columns, "path", str(file), "path")
            folder = file.parent.relative_to(path).as_posix()
            names = [name and f"{folder}/{name}".removeprefix("./") for name in listed.table[index].to_pylist()]
            masks = [column for column in columns if column.endswith(f"_{NAME}")]
            for column in (columns[index], *masks):
                paths += [f"{file.parent}/{name}" for name in listed.table[column].to_pylist() if name]
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
        notes += counted_out(path, [unlisted(image_files(path), paths, "no table lists")])
        return ImageTable(table, path, path, places, notes=notes)


def _tables(folder: Path) -> list[Path]:
    """Return the tables of a folder, or of its splits."""
    directories = [folder, *(folder / part / name for part in ("", "data") for name in SPLITS)]
    tables = (next(filter(Path.is_file, map(directory.joinpath, METADATA)), None) for directory in directories)
    return [file for file in tables if file is not None]
