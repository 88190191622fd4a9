"""A folder of images: one subfolder a class."""

import os
from pathlib import Path
from typing import Literal

from pydantic import Field

from dmlkit.datasets.base import DatasetConfig
from dmlkit.datasets.files.image import EXTENSIONS
from dmlkit.datasets.files.listing import LISTED_SPLITS, ListedRows, ListedSplit, Listing
from dmlkit.datasets.files.paths import readable_name, unreadable_name
from dmlkit.errors import UserError


class FolderConfig(DatasetConfig, frozen=True):
    """Your own images, one folder a class: ROOT/CLASS/*.jpg, or ROOT/train/CLASS and ROOT/test/CLASS.

    Without ``train`` and ``test`` folders the first half of the sorted class names trains, the rest tests. Beside
    them a folder ``validation`` may name the validation classes.
    """

    name: Literal["folder"] = "folder"
    root: str = Field(min_length=1)
    """The folder, relative to where dmlkit is started."""

    def listing(self) -> Listing:
        root = Path(self.root)
        if not root.is_dir():
            raise UserError(
                f"dataset.root: {root}: no such folder; expected one subfolder of images per class; if it has moved, "
                "--set dataset.root=PATH"
            )
        if is_split(root):
            return split_folders(root)
        classes = class_folders(root)
        half = len(classes) // 2
        return class_listing(root, [(folder, "train" if i < half else "test") for i, folder in enumerate(classes)])


def is_split(root: Path) -> bool:
    """Whether a folder has ``train`` or ``test`` folders instead of class folders."""
    return any((root / split).is_dir() for split in ("train", "test"))


def split_folders(root: Path) -> Listing:
    """The images of ROOT/train/CLASS, ROOT/test/CLASS and, if it is there, ROOT/validation/CLASS.

    Raises:
        UserError: one of ``train`` and ``test`` is missing.
    """
    splits: list[ListedSplit] = [split for split in LISTED_SPLITS if (root / split).is_dir()]
    for missing, beside in (("test", "train"), ("train", "test")):
        if missing not in splits:
            raise UserError(f"dataset.root: {root} has no folder {missing!r} beside {beside!r}; add it")
    return class_listing(root, [(folder, split) for split in splits for folder in class_folders(root / split)])


def class_listing(root: Path, classes: list[tuple[Path, ListedSplit]]) -> Listing:
    """The images of class folders; a class with a single image, or a name that is not UTF-8, is a fault.

    Raises:
        UserError: there is no class.
    """
    if not classes:
        raise UserError(f"dataset.root: {root}: too few class folders; expected at least one to train, one to test")
    rows = ListedRows(root)
    labels: dict[str, int] = {}
    for folder, split in classes:
        if not readable_name(folder.name):
            rows.faults.append(unreadable_name(str(folder)))
            continue
        label = labels.setdefault(folder.name, len(labels))
        images = image_files(folder)
        if len(images) < 2:
            rows.faults.append(
                f"{folder}: {len(images)} image(s); a class needs at least 2, to have something to find: "
                "add images or remove the folder"
            )
        for path in images:
            if readable_name(path):
                rows.add(str(folder), os.path.relpath(path, root), label, split)
            else:
                rows.faults.append(unreadable_name(path))
    return rows.listing(list(labels))


def class_folders(root: Path) -> list[Path]:
    """The subfolders of a folder in the order of their names, hidden ones left out."""
    return sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))


def image_files(folder: Path) -> list[str]:
    """The image files below a folder, sorted, hidden ones left out.

    Links to folders are followed, and every folder is taken once: links that lead in a circle end there.

    Raises:
        UserError: a folder below it cannot be read.
    """
    found: list[str] = []
    seen: set[tuple[int, int]] = set()
    for directory, folders, files in os.walk(folder, onerror=_refuse_folder, followlinks=True):
        status = os.stat(directory)  # noqa: PTH116 - as below
        if (status.st_dev, status.st_ino) in seen:
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [
            os.path.join(directory, name)  # noqa: PTH118 - Path costs 10 s for a million files
            for name in sorted(files)
            if not name.startswith(".") and os.path.splitext(name)[1].lower() in EXTENSIONS  # noqa: PTH122
        ]
    return found


def _refuse_folder(error: OSError) -> None:
    raise UserError(
        f"{error.filename}: cannot read this folder: {error.strerror}; give yourself the permission, or move it away"
    ) from error
