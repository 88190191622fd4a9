"""Dataset in a local folder of the library ``datasets`` of Hugging Face: from ``save_to_disk``, Parquet or images.

Nothing is downloaded and no script of a dataset is run: ``load_from_disk`` reads Arrow files, and ``load_dataset`` gets
the name of one of the library's own readers, never that of a script.
"""

import json
import os
import re
from collections import Counter
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field
from torch import Tensor

from dmlkit.datasets.base import DatasetConfig
from dmlkit.datasets.files.image import decode_image
from dmlkit.datasets.files.listing import LISTED_SPLITS, ListedImages, Listing
from dmlkit.datasets.folder import class_folders
from dmlkit.datasets.table import TableRows
from dmlkit.errors import OptionError, UserError, first_line, some_of
from dmlkit.files.atomic import atomic_folder
from dmlkit.files.csv_table import own_column
from dmlkit.files.image_file import BadImageError, decoding, opened
from dmlkit.files.outputs import writing
from dmlkit.files.paths import inside
from dmlkit.files.readers.base import ImageTable
from dmlkit.files.regular import EXTENSIONS, check_regular
from dmlkit.files.source import MOVED

SUFFIXES = {"JPEG": "jpg", "JPEG2000": "jp2"}
SAVED = ("dataset_dict.json", "state.json")  # files of save_to_disk


class HfConfig(DatasetConfig, frozen=True):
    """Local folder of the library ``datasets`` (Hugging Face): from save_to_disk, Parquet files or an image folder.

    It needs columns of images and of labels. Splits named train, validation and test are used as such; usually they
    share their classes, and ``split: halves`` divides the classes instead. So is a single split: the first half of the
    sorted labels is for training, the rest for testing. Nothing is downloaded, and scripts of datasets are not run.
    """

    titled_by: ClassVar = "root"
    name: Literal["hf"] = "hf"
    root: str = Field(min_length=1)
    """Folder of the dataset, or a Parquet file, relative to the working directory."""
    image: str = Field(default="image", min_length=1)
    """Column of the images."""
    label: str = Field(default="label", min_length=1)
    """Column of the labels: a ClassLabel, text or integers."""

    def listing(self) -> Listing:
        root = Path(self.root)
        parts = open_parts(root)
        others = [split for split in parts if split not in LISTED_SPLITS]
        has_splits = len(parts) > 1 and self.split in ("official", "images")
        if others and has_splits:
            raise OptionError(
                "dataset.split",
                f"{root}: unknown split {others[0]!r}; expected {', '.join(LISTED_SPLITS)}, or dataset.split halves",
            )
        for split, part in parts.items():
            check_columns(part, split, root, self.image, self.label)
        names = [f"{split}/{row}" for split, part in parts.items() for row in range(len(part))]
        if not names:
            raise OptionError("dataset.root", f"{root}: no images; the dataset has no rows")
        import pyarrow as pa

        columns = {"path": names, "label": [text for part in parts.values() for text in label_texts(part, self.label)]}
        if has_splits:
            columns["split"] = [split for split, part in parts.items() for _ in range(len(part))]
        table = pa.table({name: pa.array(values, pa.string()) for name, values in columns.items()})
        images = {split: undecoded(part, self.image) for split, part in parts.items()}
        return replace(TableRows(ImageTable(table, root, root)).listing(), make=partial(HfImages, parts=images))


class HfImages(ListedImages):
    """Images of a dataset of the library ``datasets``; its files are memory-mapped.

    Args:
        parts: the image column of each split, whose cells have ``bytes`` or a ``path``.
    """

    def __init__(self, listing: Listing, rows: np.ndarray, parts: Mapping[str, Any]) -> None:
        super().__init__(listing, rows)
        self.root, self.parts = listing.root, parts

    def file(self, index: int) -> None:
        return None

    def sample(self, index: int) -> Tensor:
        path = self.paths[index]
        *_, split, row = Path(path).parts
        with decoding(path):
            (cell,) = self.parts[split][int(row)].values()
            return decode_image(path, _content(path, cell, self.root), None, self.max_pixels)


def _content(path: str, cell: dict[str, Any] | None, root: Path) -> bytes:
    """Return the file of an image that is stored in a cell, or that the cell names below a root."""
    if not cell or (cell["bytes"] is None and not cell["path"]):
        raise BadImageError(f"{path}: this row has no image; fix or remove it")
    if cell["bytes"] is not None:
        return cell["bytes"]
    name = inside(root, cell["path"])
    if name is None:
        raise BadImageError(f"{path}: the image is outside of the dataset, at {cell['path']}; store images in it")
    check_regular(root / name)
    return (root / name).read_bytes()


def open_parts(root: Path) -> dict[str, Any]:
    """Open the splits of a folder, by name; the only one of a dataset without splits is ``train``."""
    is_file = root.suffix.lower() == ".parquet" and root.is_file()
    if not root.is_dir() and not is_file:
        raise OptionError("dataset.root", f"{root}: no such folder; {MOVED}root=PATH")
    if find_spec("datasets") is None:
        raise OptionError("dataset.name", "datasets is not installed; install it with: pip install 'dmlkit[hf]'")
    os.environ.setdefault("HF_DATASETS_OFFLINE", "1")  # read when the library is imported
    library: Any = import_module("datasets")
    library.disable_progress_bars()
    suffixes = {path.suffix.lower() for path in root.rglob("*") if path.is_file()}
    kind = "parquet" if is_file or ".parquet" in suffixes else "imagefolder" if suffixes & set(EXTENSIONS) else None
    is_saved = any((root / name).is_file() for name in SAVED)
    if not is_saved and kind is None:
        raise OptionError(
            "dataset.root", f"{root}: no dataset; expected a folder of save_to_disk, Parquet files or images"
        )
    try:
        if is_saved:
            loaded = library.load_from_disk(str(root))
        else:
            loaded = library.load_dataset(kind, **{"data_files" if is_file else "data_dir": str(root)})
    except Exception as error:  # the library raises many kinds
        raise OptionError("dataset.root", f"{root}: cannot read this dataset: {first_line(error)}") from error
    parts = dict(loaded) if isinstance(loaded, Mapping) else {"train": loaded}
    for split, part in parts.items():
        for name, kind in part.features.items():
            if isinstance(kind, Mapping) and {*kind} == {"bytes", "path"}:  # written without the library
                parts[split] = parts[split].cast_column(name, library.Image())
    return parts


def stored_dataset(path: Path, columns: Mapping[str, str]) -> HfConfig | None:
    """Return the dataset at a path whose images are stored in Parquet or Arrow; None for another path.

    ``columns`` may name the columns ``path``, that of the images, and ``label``.
    """
    if not (features := stored_features(path)):
        return None
    if wrong := [name for name, column in columns.items() if name not in ("path", "label") or not column]:
        raise UserError(
            f"--column {wrong[0]}={columns[wrong[0]]}: {path} stores its images, so only path=NAME and label=NAME "
            "apply; save them with dmlkit data convert, and give this option with the table that it writes"
        )
    images = [name for name, is_image in features.items() if is_image]
    image = columns.get("path") or images[0]
    if len(images) > 1 and "path" not in columns:
        raise UserError(f"{path}: {' and '.join(images)} hold images; name one of them with --column path=NAME")
    names = list(features)
    label = names[own_column(names, columns.get("label") or "label", str(path), "label")]
    subsets = {file.parent for file in _parquet_files(path)} - {path, path / "data"}
    root = path if path.is_file() or not subsets else subsets.pop()
    return HfConfig(root=str(root), image=image, label=label, validation_fraction=0.0)


def _parquet_files(path: Path) -> list[Path]:
    """Return the Parquet files of a dataset: a file, those of a folder and of its ``data``, or of its only subset."""
    if path.suffix.lower() == ".parquet":
        return [path]
    files, nested = [*path.glob("*.parquet"), *path.glob("data/*.parquet")], list[Path]()
    for folder in class_folders(path) if path.is_dir() and not files else ():
        names = [entry.name for entry in os.scandir(folder)]
        if any(os.path.splitext(name)[1].lower() in EXTENSIONS for name in names):  # noqa: PTH122 - Path is slow
            return []  # folders of images
        nested += [folder / name for name in names if name.endswith(".parquet")]
    return files or (nested if len({file.parent for file in nested}) == 1 else [])


def stored_features(path: Path) -> dict[str, bool]:
    """Return whether each column of a stored dataset holds images; none if no column does, or for another path."""
    from pyarrow import parquet, types

    holds_images = dict[str, bool]()
    for file in (candidate for candidate in sorted(_parquet_files(path))[:1] if candidate.is_file()):
        with suppress(OSError, ValueError):  # reported by the reader of tables
            holds_images = {
                column.name: types.is_struct(column.type) and column.type.get_field_index("bytes") >= 0
                for column in parquet.read_schema(file)
            }
    if any((path / name).is_file() for name in SAVED):
        for file in sorted([*path.glob("dataset_info.json"), *path.glob("*/dataset_info.json")])[:1]:
            with suppress(OSError, ValueError, AttributeError):  # reported where the dataset is read
                features: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")).get("features") or {}
                holds_images = {name: kind.get("_type") == "Image" for name, kind in features.items()}
    return holds_images if any(holds_images.values()) else {}


def check_columns(part: Any, split: str, root: Path, image: str, label: str) -> None:
    """Raise an `OptionError` unless a split has a column of images and one of labels, of types that can be read."""
    library: Any = import_module("datasets")
    features = part.features
    for key, name in (("image", image), ("label", label)):
        if name not in features:
            raise OptionError(
                f"dataset.{key}", f"{root}: {split} has no column {name!r}; expected one of {', '.join(features)}"
            )
    if not isinstance(features[image], library.Image):
        kind = type(features[image]).__name__
        raise OptionError("dataset.image", f"{root}: column {image!r} of {split} has type {kind}, expected Image")
    kind = features[label]
    is_plain = isinstance(kind, library.Value) and kind.dtype.startswith(("string", "large_string", "int", "uint"))
    if not isinstance(kind, library.ClassLabel) and not is_plain:
        raise OptionError(
            "dataset.label",
            f"{root}: column {label!r} of {split} has type {getattr(kind, 'dtype', type(kind).__name__)}, expected "
            "ClassLabel, text or integers",
        )


def label_texts(part: Any, label: str) -> list[str | None]:
    """Return the labels of a split as text; None for a row without a label, which a ClassLabel has as -1."""
    names: list[str] | None = getattr(part.features[label], "names", None)
    values = list(part.select_columns([label]).with_format(None)[label])
    if names is None:
        return [None if value is None else str(value) for value in values]
    return [None if value is None or value < 0 else names[value] for value in values]


def undecoded(part: Any, image: str) -> Any:
    """Return the image column of a split, whose cells stay files."""
    library: Any = import_module("datasets")
    return part.select_columns([image]).with_format(None).cast_column(image, library.Image(decode=False))


@contextmanager
def saved_images(path: Path, columns: Mapping[str, str], folder: Path) -> Generator[ImageTable | None]:
    """Save the images of a stored dataset as files in a folder, and yield their table with all other columns.

    The folder appears after the block, which writes the table: a command that is killed before can run again. None is
    yielded for another path, see `stored_dataset`.
    """
    import pyarrow as pa

    if (config := stored_dataset(path, columns)) is None:
        yield None
        return
    if folder.exists():
        raise UserError(f"{folder}: exists already, where the images would be saved; choose another --output")
    root, tables, faults, hidden = Path(config.root), list[Any](), list[str](), set[str]()
    parts, numbers = open_parts(root), Counter[str]()  # by stem, because fold1 and fold2 have the same
    with writing(folder), atomic_folder(folder) as partial:
        for split, part in parts.items():
            check_columns(part, split, root, config.image, config.label)
            names, stem = list[str | None](), re.sub(r"[^a-z]", "_", split)
            for row, (cell,) in enumerate(record.values() for record in undecoded(part, config.image)):
                where, name = f"{root}: row {row + 1} of {split}", f"{stem}-{numbers[stem]:06}"
                names.append(None)
                numbers[stem] += 1
                try:
                    with decoding(where), opened(where, content := _content(where, cell, root)) as image:
                        suffix = SUFFIXES.get(image.format or "", f"{image.format}".lower())
                    (partial / f"{name}.{suffix}").write_bytes(content)
                    names[-1] = f"{name}.{suffix}"
                except BadImageError as error:
                    faults.append(str(error))
            known = {"path": pa.array(names, pa.string()), "label": pa.array(label_texts(part, config.label))}
            known |= {"split": pa.array([split] * len(part))} if len(parts) > 1 else {}
            others = part.remove_columns([config.image, config.label]).with_format("arrow")[:]
            hidden |= known.keys() & {*others.column_names}
            tables.append(pa.table({name: others[name] for name in others.column_names} | known))
        table = pa.concat_tables(tables, promote_options="permissive")
        notes = [f"{root}: left out: other columns {some_of(sorted(hidden))}"] if hidden else []
        yield ImageTable(table.filter(table["path"].is_valid()), root, folder, faults=faults, notes=notes)
