"""Data sets of YOLO: a data.yaml with the names of the classes, and folders of images and of their labels."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dmlkit.errors import UserError
from dmlkit.files.paths import inside
from dmlkit.files.readers.base import ImageTable, Reader, counted_out, files_below, table_of
from dmlkit.files.readers.yolo import box_lines, text_files, yolo_rows
from dmlkit.files.regular import EXTENSIONS
from dmlkit.files.yaml_tree import read_yaml

SPLITS = {"train": "train", "val": "validation", "test": "test"}
FILE = "data.yaml"


class YoloDatasetReader(Reader):
    """Reader of a data.yaml, or of its folder: a row per box, with the name of its class as the label."""

    title = "YOLO data set"

    def recognizes(self, path: Path) -> bool:
        file = path / FILE if path.is_dir() else path
        if file.suffix.lower() not in (".yaml", ".yml") or not file.is_file():
            return False
        try:
            content = _content(file)
        except UserError:  # a recipe with a fault, which is reported where recipes are read
            return False
        return "names" in content and not content.keys().isdisjoint(SPLITS)

    def read(self, path: Path) -> ImageTable:
        file, faults = path / FILE if path.is_dir() else path, list[str]()
        content, rows, places = _content(file), list[Mapping[str, Any]](), list[str]()
        names: Any = content["names"]
        if not isinstance(names, dict | list):
            raise UserError(f"{file}: names: got {names!r}, expected the names of the classes, e.g. [fox, owl]")
        numbered = names.items() if isinstance(names, dict) else enumerate(names)
        labels = {str(number): str(name) for number, name in numbered}
        absent, empty, notes = set[str](), 0, list[str]()
        words = 5 if "kpt_shape" in content else None  # the points of a pose follow, which are no polygon
        for split, images in _folders(file, content):
            folder = _labels_of(images)
            lines = [line for text in text_files(folder, notes) for line in box_lines(folder, text, faults, words)]
            files, labeled = dict[str, Path](), {line.name for line in lines}
            for image in files_below(images, EXTENSIONS, notes):
                name = image.relative_to(images).with_suffix("").as_posix()
                if (other := files.setdefault(name, image)) != image and name in labeled:
                    faults.append(f"{image}: has the labels of {other}; expected one image of this name")
            boxes = yolo_rows(folder, [line for line in lines if line.name in files], faults)
            absent |= {f"{folder / line.name}.txt" for line in lines if line.name not in files}
            empty += len(files.keys() - {line.name for line in lines})
            places += boxes.places
            for row, where in zip(boxes.table.to_pylist(), boxes.places, strict=True):
                number = row.pop("class_number")
                if number not in labels:
                    faults.append(f"{where}: class {number}, but {file} names {len(labels)}")
                name = files[row["path"]].relative_to(file.parent).as_posix()
                rows.append(row | {"path": name, "label": labels.get(number), "split": split})
        counts = [
            (len(absent), "file of labels without an image", "files of labels without an image"),
            (empty, "image without boxes", "images without boxes"),
        ]
        notes += counted_out(file, counts)
        return ImageTable(table_of(rows), file, file.parent, places, is_share=True, faults=faults, notes=notes)


def _content(file: Path) -> dict[str, Any]:
    data = read_yaml(file, "YOLO data set", f"{file}: no such file").data
    return data if isinstance(data, dict) else {}


def _folders(file: Path, content: Mapping[str, Any]) -> Iterator[tuple[str, Path]]:
    """Yield the split and the folders of images of each of its keys, below the file.

    Roboflow's ``../train/images`` is read as ``train/images``.
    """
    for key, split in SPLITS.items():
        names: Any = content.get(key) or []
        for name in names if isinstance(names, list) else [names]:
            joined = Path(str(content.get("path") or "")) / str(name)
            tried = (str(joined), str(name), str(name).removeprefix("../"))
            safe = (inside(file.parent, candidate) for candidate in tried)
            folder = next(
                (file.parent / path for path in safe if path is not None and (file.parent / path).is_dir()), None
            )
            if folder is None:
                raise UserError(
                    f"{file}: {key}: {str(name)!r} is no folder below {file.parent}; move the file next to it"
                )
            yield split, folder


def _labels_of(images: Path) -> Path:
    """Return the folder of labels: that of the images, with ``labels`` for the last part ``images``."""
    parts = list(images.parts)
    indices = [index for index, part in enumerate(parts) if part == "images"]
    return Path(*parts[: indices[-1]], "labels", *parts[indices[-1] + 1 :]) if indices else images
