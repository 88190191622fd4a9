"""Cars196 dataset: 196 models of cars."""

import csv
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from dmlkit.datasets.base import DatasetConfig
from dmlkit.datasets.files.archives import Archive, Published, locate, md5, whole_number
from dmlkit.datasets.files.listing import ListedRows, Listing
from dmlkit.datasets.folder import benchmark_folders, class_folders, class_listing
from dmlkit.errors import first_line
from dmlkit.files.paths import read_lines

CLASSES, TRAINING_CLASSES = 196, 98
SITE = "http://ai.stanford.edu/~jkrause/cars/car_dataset.html"
MD5 = {
    "cars_annos.mat": "b407c6086d669747186bd1d764ff9dbc",
    "cars_test_annos_withlabels.mat": "b0a2b23655a3edd16d84508592a98d10",
}
"""Published sums of MATLAB files; those of ``devkit/`` have none of their own."""


class Cars196Config(DatasetConfig, frozen=True):
    """Cars196 (Krause et al. 2013): models 1-98 for training, 99-196 for testing; uncropped images; research only.

    The flag of the closed-set split is ignored. Layouts: ``cars_annos.mat`` and ``car_ims/``; ``devkit/``,
    ``cars_train/`` and ``cars_test/`` with ``cars_test_annos_withlabels.mat``; Kaggle's ``names.csv``,
    ``anno_train.csv``, ``anno_test.csv`` and ``car_data/car_data/``; ``train/`` and ``test/`` folders of classes. All
    may be inside a folder ``cars196/``. Also 196 folders of classes in the root, whose names sort in the order of the
    models; they may have fewer images, such as the half that ``devkit/cars_train_annos.mat`` lists.
    """

    published: ClassVar[Published] = Published(
        title="Cars196",
        archives=(
            Archive("car_ims.tgz", SITE, "d5c8f0aa497503f355e17dc7886c3f14"),
            Archive("cars_annos.mat", SITE, MD5["cars_annos.mat"]),
        ),
        signs=("cars_annos.mat", "anno_train.csv", "devkit", "cars196"),
        counts={"train": (8054, 98), "test": (8131, 98)},
    )

    name: Literal["cars196"] = "cars196"
    root: str = Field(min_length=1)
    """Folder into which the archives were unpacked."""

    def listing(self) -> Listing:
        root = Path(self.root)
        for marker, read in LAYOUTS.items():
            folder = locate(root, ("cars196", "."), (marker,))
            if folder is not None:
                return read(folder)
        folders = class_folders(root) if root.is_dir() else []
        if len(folders) == CLASSES:
            return class_listing(root, [(folder, "train") for folder in folders]).halved()
        layouts = ", ".join([*LAYOUTS, f"{CLASSES} folders of classes"])
        return benchmark_folders(root, ("cars196", "."), self.published, layouts)


CarsRow = tuple[str, str, int]
"""Place of an image in a list, its name relative to the root, and its model, from 1."""


def to_listing(rows: ListedRows, images: Iterable[CarsRow], class_names: Iterable[str]) -> Listing:
    """Return the listing of the images; report models outside 1..C, where C is the number of names."""
    names = [str(name) for name in class_names]
    for where, name, model in images:
        if 1 <= model <= len(names):
            rows.add(where, name, model - 1, "train" if model <= TRAINING_CLASSES else "test")
        else:
            rows.faults.append(f"{where}: class {model} of {name!r}; expected a class from 1 to {len(names)}")
    return rows.listing(names)


def from_annotations(folder: Path) -> Listing:
    """Read ``cars_annos.mat`` next to ``car_ims/``."""
    rows = ListedRows(folder)
    path = folder / "cars_annos.mat"
    contents = read_mat(path, ("annotations", "class_names"), rows.faults)
    images = mat_rows(path, contents, "relative_im_path", "", rows.faults)
    return to_listing(rows, images, contents.get("class_names", ()))


def from_devkit(folder: Path) -> Listing:
    """Read ``devkit/`` next to the two folders of images and the published test labels."""
    rows = ListedRows(folder)
    meta, images = read_mat(folder / "devkit" / "cars_meta.mat", ("class_names",), rows.faults), list[CarsRow]()
    for part, file in (("train", "devkit/cars_train_annos.mat"), ("test", "cars_test_annos_withlabels.mat")):
        contents = read_mat(folder / file, ("annotations",), rows.faults)
        images += mat_rows(folder / file, contents, "fname", f"cars_{part}/", rows.faults)
    return to_listing(rows, images, meta.get("class_names", ()))


def from_kaggle(folder: Path) -> Listing:
    """Read ``names.csv`` and ``anno_{train,test}.csv``: name, box, model; images in folders named after the models."""
    rows = ListedRows(folder)
    names = [line.strip().strip('"') for line in read_lines(folder / "names.csv", rows.faults) if line.strip()]
    images = list[CarsRow]()
    for split in ("train", "test"):
        path = folder / f"anno_{split}.csv"
        for line, text in enumerate(read_lines(path, rows.faults), start=1):
            cells = list[str]()
            with suppress(csv.Error):  # a cell has more than 131 072 characters
                cells = next(csv.reader([text]), [])
            model = whole_number(cells[-1].strip()) if len(cells) > 1 else None
            if model is None:
                rows.faults.append(f"{path}:{line}: got {text!r}, expected name,x1,y1,x2,y2,class")
                continue
            name = names[model - 1].replace("/", "-") if 1 <= model <= len(names) else ""
            images.append((f"{path}:{line}", f"car_data/car_data/{split}/{name}/{cells[0]}", model))
    return to_listing(rows, images, names)


LAYOUTS = {"cars_annos.mat": from_annotations, "devkit": from_devkit, "anno_train.csv": from_kaggle}
"""Reader of each layout, by the file that identifies the layout."""


def read_mat(path: Path, needed: tuple[str, ...], faults: list[str]) -> dict[str, Any]:
    """Return variables of a MATLAB file as arrays; none, and a line in ``faults``, if it cannot be read.

    A damaged byte can end the process in SciPy's reader, so a file with a published MD5 sum must have it.
    """
    from scipy.io import loadmat

    try:
        checksum = md5(path)
        if checksum != (expected := MD5.get(path.name, checksum)):
            faults.append(f"{path}: has the MD5 sum {checksum}, expected {expected}; download it again")
            return {}
        contents = loadmat(path, squeeze_me=True, variable_names=needed)
        return {name: np.atleast_1d(contents[name]) for name in needed}
    except FileNotFoundError:
        faults.append(f"{path}: no such file; download it from the site of the archive")
    except Exception as error:  # SciPy raises many kinds for damaged files
        faults.append(f"{path}: cannot read this MATLAB file: {first_line(error)}; download it again")
    return {}


def mat_rows(path: Path, contents: dict[str, Any], field: str, prefix: str, faults: list[str]) -> Iterator[CarsRow]:
    """Yield the images of the structure array ``annotations``: the path from ``field``, the model from ``class``."""
    if not contents:
        return
    annotations = contents["annotations"]
    try:
        cells = [(str(name), int(model)) for name, model in zip(annotations[field], annotations["class"], strict=True)]
    except (ValueError, TypeError, IndexError):
        faults.append(f"{path}: has no {field} and class of each image; expected the annotations of Cars196")
        return
    for number, (name, model) in enumerate(cells, start=1):
        yield f"{path}: annotation {number}", f"{prefix}{name}", model
